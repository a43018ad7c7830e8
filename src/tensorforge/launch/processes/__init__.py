"""The launcher's child processes: how they start, what runs inside them, how their output is read and their end
is ensured."""
