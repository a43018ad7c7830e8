"""Values and rules of the registry: versions, the lifecycle, evidence, filters. Pure: no database, no clock."""
