"""The served side of training: the vLLM process, the weight push and its verification.

Nothing is imported here: vLLM's own processes load `vllm_plugin` through this package.
"""
