"""The registry's database: its tables, the conversion of rows to values, the audit and the outbox.

`reads` answers questions, `writes` makes changes.
"""
