"""The dashboard: pages on which a person sees the runs, their checkpoints, the models and traces of memory.

A request takes this way. `dashboard_app` checks the session (`sessions`) and calls a handler of `run_pages`,
`checkpoint_pages`, `model_pages` or `memory_pages`. The handler reads its facts (`run_sources` and
`metrics_index` for runs, the catalog and the registry for the rest), `charts` draws them as SVG, and
`page_renderer` fills a template. `live_updates` sends the parts of a page again when they change.

The pages need the extra `serve`, and no torch.
"""
