"""OpenAI's Batch API: files of requests that are answered when nobody else needs the device."""
