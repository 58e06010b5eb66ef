"""Where vllm_rbln looks for the module that registers attention ops."""
