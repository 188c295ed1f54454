"""`/generate`: SGLang's format of requests and answers."""
