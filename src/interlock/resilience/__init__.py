"""Protection against failing upstreams: retries, circuit breakers, failover between endpoints, rate limits."""
