"""The coordinator: a pure machine that decides, a journal that remembers, a server around both."""
