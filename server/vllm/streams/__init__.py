"""What is sent of a stream: chunks without models, fields put on them."""
