"""Which tables a SQL text reads, without a parser for SQL."""

from __future__ import annotations

import pytest

from millstream.spark.pipelines.sql import SqlBroken, check_sql, tables_of


@pytest.mark.parametrize(
    ("text", "tables"),
    [
        ("SELECT 1", []),
        ("SELECT * FROM orders", ["orders"]),
        ("select * from Orders o where o.id in (select id from blocked)", ["Orders", "blocked"]),
        ("SELECT * FROM a, b AS c, d e JOIN f ON e.x = f.x LEFT JOIN g USING (x)", ["a", "b", "d", "f", "g"]),
        ("SELECT 'FROM nowhere' AS text -- FROM comment\nFROM a /* FROM b */", ["a"]),
        ('SELECT "it\'s FROM x", \'a\'\'b FROM y\' FROM z', ["z"]),
        ("SELECT EXTRACT(YEAR FROM timestamp), TRIM(BOTH ' ' FROM name) FROM a", ["a"]),
        ("SELECT * FROM a WHERE b IS NOT DISTINCT FROM c AND d IS DISTINCT FROM e", ["a"]),
        ("SELECT DISTINCT x FROM a", ["a"]),
        ("WITH n AS (SELECT * FROM a), o (id) AS (SELECT id FROM b) SELECT * FROM n JOIN o ON true", ["a", "b"]),
        ("SELECT * FROM (SELECT * FROM a) AS inner_rows JOIN (b JOIN c ON b.x = c.x) ON true", ["a", "b", "c"]),
        ("SELECT * FROM `a` UNION ALL SELECT * FROM b LATERAL VIEW explode(xs) t AS x", ["a", "b"]),
        ("SELECT * FROM range(10) r, shop.customers, parquet.`/data/x`, own", ["own"]),
        ("WITH a AS (SELECT * FROM a WHERE x > 0) SELECT * FROM a", ["a"]),
        ("WITH n AS (SELECT * FROM a), a AS (SELECT * FROM n) SELECT * FROM a", ["a"]),
        ("WITH a AS (SELECT * FROM b), n AS (SELECT * FROM a) SELECT * FROM n", ["b"]),
        ("SELECT * FROM (WITH a AS (SELECT * FROM b) SELECT * FROM a) JOIN a ON true", ["a", "b"]),
        ("WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 9) SELECT * FROM n, a", ["a"]),
        ("SELECT * FROM STREAM a", ["a"]),
        ("SELECT count(*) FROM a GROUP BY window(time, '1 minute') HAVING count(*) > (SELECT n FROM b)", ["a", "b"]),
    ],
)  # fmt: skip
def test_tables_are_found(text: str, tables: list[str]) -> None:
    assert sorted(tables_of(text)) == sorted(tables)


@pytest.mark.parametrize(
    "text", ["SELECT 'a", 'SELECT "a', "SELECT (1", "SELECT 1)", "SELECT [1)", "SELECT `a", "/* a"]
)
def test_what_ends_in_the_middle_is_noticed(text: str) -> None:
    with pytest.raises(SqlBroken):
        check_sql(text)
