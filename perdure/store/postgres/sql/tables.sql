-- Tables of extensions do not count.
SELECT class.relname AS name
FROM pg_class AS class
JOIN pg_namespace AS namespace ON namespace.oid = class.relnamespace
WHERE namespace.nspname = current_schema()
    AND class.relkind IN ('r', 'p')
    AND NOT EXISTS (
        SELECT 1 FROM pg_depend AS owner WHERE owner.objid = class.oid AND owner.deptype = 'e'
    )
