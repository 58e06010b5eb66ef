"""Custom tools: functions for vLLM, whose input a grammar guides inside of JSON."""
