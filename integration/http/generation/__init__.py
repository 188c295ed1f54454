"""`/generate`: SGLang's wire."""
