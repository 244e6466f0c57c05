UPDATE perdure_schema SET version = :version
