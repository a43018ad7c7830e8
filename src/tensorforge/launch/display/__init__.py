"""How a run is shown: `run_view` collects the events, `render` draws them, `displays` write them out."""
