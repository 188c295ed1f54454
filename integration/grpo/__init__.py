"""The GRPO training job."""
