SELECT application, version FROM perdure_schema
