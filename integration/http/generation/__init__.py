"""The path `/generate`, in SGLang's format of requests and answers."""
