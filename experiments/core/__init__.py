"""What every experiment is made of: config, workload, engine, driver, metrics and the folders of results."""
