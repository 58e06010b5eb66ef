"""Bounds of time and size that are the same for every server, each with its reason.

Modules read them when they need them, so that a test can shorten one.
"""

from __future__ import annotations

HEADER_TIMEOUT_S = 10.0
"""For a request's headers, and for the TLS handshake: ten round trips of a very slow client."""
LINGER_S = 2.0
"""After an answer that ends the connection: what a client needs to read it and stop sending.
Closing at once would reset the connection and lose the answer. Also between two bytes of a body
that goes on after its answer."""
LINGER_BYTES = 16 * 1024 * 1024
"""Bytes received and dropped in that time."""
BODY_LINGER_S = 30.0
"""For the rest of a body after its answer: 30 MB at 10 Mbit/s. nginx has the same default."""
BODY_LINGER_BYTES = 256 * 1024 * 1024
"""Bytes of it: a proxy that has buffered a body sends all of it before it reads the answer.
Dropping them takes about a quarter of a second."""
WRITE_TIMEOUT_S = 30.0
"""In which a client must read something of its answer; then its request is aborted."""
BODY_TIMEOUT_S = 30.0
"""For a request's body: 4 MiB at 1 Mbit/s."""
UPLOAD_TIMEOUT_S = 600.0
"""For an uploaded file: 200 MiB at 3 Mbit/s."""
STREAM_COMMIT_S = 5.0
"""For which the status of a stream waits for its first event, so that an error until then gets its
own status; proxies and clients wait for headers much longer."""
DEATH_LINGER_S = 2.0
"""For which requests get 503 with the reason after the engine failed: probes come each second."""

READ_TIMEOUT_S = 10.0
"""For parsing and checking a large body, and again for rendering its template; 4 MiB take 0.3 s."""
RENDER_TIMEOUT_S = 3.0
"""For rendering a small conversation by a template whose loops have no known bound; others wait."""
READ_WORKERS = 1
"""Processes that parse and check large bodies: more would take cores from the engine."""

MAX_JSON_DEPTH = 64
"""Nesting of a body. Tools and schemas of clients stay below 20; recursion in pydantic and Jinja
must not reach Python's limit."""
MAX_MESSAGES = 2048
"""Messages, or items of an `input`: rendering takes a time proportional to them."""
MAX_TOOLS = 256
"""Tools of a request; OpenAI's limit is 128."""
MAX_PROMPTS = 256
"""Prompts of a completion or pooling request, which the engine queues one by one."""
MAX_LOGIT_BIAS = 1024
"""Entries of `logit_bias`, which are copied to the batch."""

SCHEMA_MAX_DEPTH = 32
"""Nesting of a schema."""
SCHEMA_MAX_NODES = 4096
"""Objects, arrays and values of a schema."""
SCHEMA_MAX_ENUM = 1024
"""Values of one `enum` or `choice`."""
SCHEMA_MAX_PATTERN = 1024
"""Characters of a `pattern` or regex."""
SCHEMA_CACHE_ENTRIES = 1024
"""Cached verdicts on grammars, of some 100 bytes each."""

MAX_FILES_PER_KEY = 1000
"""Files of one API key; without keys, of all clients. Their bytes are bounded by
`--max-stored-bytes`."""
MAX_BATCHES_PER_KEY = 100
"""Unfinished batches of one API key: each holds an input file open."""
MAX_RESPONSES_PER_KEY = 10_000
"""Stored responses of one API key: bounds the list that a client may page through."""
MAX_CONVERSATION_BYTES = 16 * 1024 * 1024
"""Stored turns that one request continues, which are read into memory."""
MAX_CONTINUED_BYTES = 64 * 1024 * 1024
"""The same of all running requests. Conversations of up to 64 KiB do not count."""
MAX_BACKGROUND_PER_KEY = 100
"""Waiting and running background responses of one API key."""
MAX_BACKGROUND = 1000
"""The same of all keys; their ids are in memory."""
