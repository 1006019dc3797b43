"""`vllm bench`: a load generator for OpenAI servers, and timings of the engine in this process."""
