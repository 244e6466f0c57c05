SELECT compatible FROM perdure_schema
