"""What users give: options of an engine, of a request, and vLLM's names of both."""
