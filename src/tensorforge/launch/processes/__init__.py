"""Child processes: started, read, ended, never left behind."""
