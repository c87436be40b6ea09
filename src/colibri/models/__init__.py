"""One declarative file a family; blueprint, census, plan and loader for every family alike."""
