"""Where things are kept: the metadata database, and blobs.

database.py   SQLite or PostgreSQL behind one small surface
"""
