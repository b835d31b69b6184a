FITTED: dict[str, dict[str, float]] = {"vllm": {}, "sglang": {}, "trtllm": {}}
