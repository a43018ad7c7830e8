"""Durable storage: blobs in a folder, in memory or in an object store, and the metadata database.

`blobs` states what every blob store promises; `opening` opens a store by its path or URL. A blob's way to a
local disk: `local_store` opens a writer, whose bytes go to a file in the staging folder (`staged_file`) by
calls that a test can replace (`system_calls`). The commit syncs the file and gives it its name, so readers
see a complete blob or none. `range_reader` reads it back, from the page cache or past it. `memory_store`
and `object_store` make the same promises for memory and for S3, Google Cloud Storage and Azure.

`database` is SQLite or PostgreSQL behind one interface for journal, catalog and registry. `write_batch`
lets several changes share one commit, `prepared` skips SQLAlchemy for hot statements, and `sqlite_memory`
switches off a lock in SQLite.
"""
