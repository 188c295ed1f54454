"""The engine of one rank of the main job, one module for each way to bring the weights in."""
