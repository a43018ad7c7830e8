"""Tools for the tests of TensorForge and of its users; shipped code never imports them."""
