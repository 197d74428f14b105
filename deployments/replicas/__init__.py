"""The worker deployments: a target group, a draft pool, and what both share."""
