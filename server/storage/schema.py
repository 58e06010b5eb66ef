"""Tables of the database."""

from __future__ import annotations

VERSION = 9
"""Version of the tables, in the database's `user_version`; change it with the tables."""
_OBJECTS = """
CREATE TABLE files (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, purpose TEXT NOT NULL, name TEXT NOT NULL,
    bytes INTEGER NOT NULL, created_at INTEGER NOT NULL, expires_at INTEGER
) WITHOUT ROWID;
CREATE INDEX files_by_owner ON files (owner, created_at, id);
CREATE TABLE batches (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, endpoint TEXT NOT NULL, input_file TEXT NOT NULL,
    status TEXT NOT NULL, created_at INTEGER NOT NULL, expires_at INTEGER NOT NULL,
    keep_s INTEGER NOT NULL, metadata TEXT NOT NULL, moments TEXT NOT NULL, errors TEXT NOT NULL,
    output_file TEXT, error_file TEXT, model TEXT, idempotency TEXT, asked TEXT NOT NULL,
    total INTEGER NOT NULL, completed INTEGER NOT NULL, failed INTEGER NOT NULL,
    output_bytes INTEGER NOT NULL, error_bytes INTEGER NOT NULL,
    input_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL, output_tokens INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX batches_by_owner ON batches (owner, created_at, id);
CREATE UNIQUE INDEX batches_once ON batches (owner, idempotency) WHERE idempotency IS NOT NULL;
CREATE INDEX batches_open ON batches (created_at, id)
    WHERE status IN ('validating', 'in_progress', 'finalizing', 'cancelling');
CREATE TABLE lines (
    batch TEXT NOT NULL, number INTEGER NOT NULL, custom_id TEXT NOT NULL, place INTEGER NOT NULL,
    bytes INTEGER NOT NULL, shared TEXT NOT NULL, done INTEGER NOT NULL,
    PRIMARY KEY (batch, number)
) WITHOUT ROWID;
CREATE INDEX lines_to_do ON lines (batch, shared, number) WHERE NOT done;
-- Outputs have a column: conversations join them as bytes, and their length needs no decoding.
CREATE TABLE responses (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, previous TEXT, status TEXT NOT NULL,
    created_at INTEGER NOT NULL, expires_at INTEGER,
    background INTEGER NOT NULL, streams INTEGER NOT NULL, tier TEXT NOT NULL,
    tries INTEGER NOT NULL, request BLOB, input BLOB NOT NULL, answer BLOB NOT NULL,
    bytes INTEGER NOT NULL, output BLOB NOT NULL
);
CREATE INDEX responses_by_owner ON responses (owner);
CREATE INDEX responses_by_size ON responses (bytes);
CREATE INDEX responses_by_previous ON responses (previous) WHERE previous IS NOT NULL;
CREATE INDEX responses_by_status ON responses (status, created_at);
CREATE INDEX responses_by_end ON responses (expires_at) WHERE expires_at IS NOT NULL;
CREATE INDEX responses_open ON responses (owner, created_at)
    WHERE status IN ('queued', 'in_progress');
CREATE TABLE response_events (
    response TEXT NOT NULL, number INTEGER NOT NULL, frame TEXT NOT NULL,
    PRIMARY KEY (response, number)
) WITHOUT ROWID;
CREATE TABLE owner_salt (salt BLOB NOT NULL);
INSERT INTO owner_salt VALUES (randomblob(32));
"""
# Triggers maintain the sums, because quotas are checked for each chunk of an upload.
_USAGE = """
CREATE TABLE usage (
    owner TEXT NOT NULL, kind TEXT NOT NULL, objects INTEGER NOT NULL, bytes INTEGER NOT NULL,
    PRIMARY KEY (owner, kind)
) WITHOUT ROWID;
""" + "".join(
    f"""
CREATE TRIGGER {table}_added AFTER INSERT ON {table} BEGIN
    INSERT INTO usage SELECT NEW.owner, '{table}', 0, 0 WHERE NOT EXISTS
        (SELECT 1 FROM usage WHERE owner = NEW.owner AND kind = '{table}');
    UPDATE usage SET objects = objects + 1, bytes = bytes + NEW.bytes
        WHERE owner = NEW.owner AND kind = '{table}';
END;
CREATE TRIGGER {table}_removed AFTER DELETE ON {table} BEGIN
    UPDATE usage SET objects = objects - 1, bytes = bytes - OLD.bytes
        WHERE owner = OLD.owner AND kind = '{table}';
END;
CREATE TRIGGER {table}_grown AFTER UPDATE OF bytes ON {table} BEGIN
    UPDATE usage SET bytes = bytes + NEW.bytes - OLD.bytes
        WHERE owner = NEW.owner AND kind = '{table}';
END;
"""
    for table in ("files", "responses")
)
TABLES = _OBJECTS + _USAGE
"""Statements that make the tables of an empty database."""
