"""A virtual clock that plays a plan on a cluster: pipelines, shared links, servers, stragglers, failures. Pure."""
