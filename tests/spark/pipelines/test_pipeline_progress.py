"""What Spark says about batches and failures, made into a few numbers and one sentence."""

from __future__ import annotations

from typing import Any

import pytest

from millstream.spark.pipelines.failures import sentence_of
from millstream.spark.pipelines.progress import BatchDone, Standing, batch_of, lag_of


def progress(**more: Any) -> dict[str, Any]:
    source = {
        "startOffset": {"orders": {"0": 10, "1": 5}},
        "endOffset": '{"orders": {"0": 30, "1": 5, "2": 0}}',
        "latestOffset": {"orders": {"0": 100, "1": 5, "2": 7}},
        "numInputRows": 40,
    }
    durations = {"addBatch": 300, "triggerExecution": 500}
    return {"batchId": 7, "timestamp": "2026-01-01T00:00:00Z", "sources": [source], "durationMs": durations} | more


def test_rows_are_counted_by_offsets_so_that_two_sinks_do_not_count_them_twice() -> None:
    assert batch_of("topics", progress()) == BatchDone("topics", 7, 20, 40.0, 77, 500, "2026-01-01T00:00:00Z")


def test_a_trigger_without_work_is_no_batch_but_tells_the_lag() -> None:
    idle = progress(durationMs={"latestOffset": 3, "triggerExecution": 3})
    assert batch_of("topics", idle) is None
    assert lag_of(idle) == 77


def test_sources_that_have_no_offsets_are_counted_by_spark_and_have_no_lag() -> None:
    files = progress(sources=[{"startOffset": None, "endOffset": {"logOffset": 3}, "numInputRows": 12}])
    done = batch_of("files", files)
    assert done is not None
    assert (done.rows, done.lag) == (12, -1)


def test_the_first_batch_has_no_start_so_what_spark_counts_is_divided() -> None:
    source = {"startOffset": None, "endOffset": {"o": {"0": 7}}, "latestOffset": {"o": {"0": 20}}, "numInputRows": 14}
    done = batch_of("topics", progress(sources=[source]), reads=2)
    assert done is not None
    assert (done.rows, done.lag) == (7, 13)


def test_a_topic_that_was_made_again_counts_nothing_before_it_is_read() -> None:
    source = {
        "startOffset": {"o": {"0": 7, "uid": 11}},
        "endOffset": {"o": {"0": 0, "uid": 12}},
        "latestOffset": {"o": {"0": 20}},
    }
    done = batch_of("topics", progress(sources=[source]))
    assert done is not None
    assert (done.rows, done.lag) == (0, 20)


def test_a_standing_adds_up_what_its_queries_do() -> None:
    standing = Standing("clean", "run-1")
    standing.take(BatchDone("topics", 3, 100, 50.0, 7, 2000, ""))
    standing.take(BatchDone("archive", 9, 10, 20.0, 40, 500, ""))
    report = standing.report()
    assert (report.rows, report.rows_per_s, report.lag, report.batch, report.batch_ms) == (110, 70.0, 40, 9, 2000)
    standing.idle.add("topics")
    assert standing.rows_per_s == 20.0


PYTHON = """[STREAM_FAILED] Query [id = 1, runId = 2] terminated with exception: Job aborted: Task 0 in \
stage 3.0 failed 1 times, most recent failure: Lost task 0.0: org.apache.spark.api.python.PythonException: Traceback \
(most recent call last):
  File "/x/worker.py", line 1, in main
    process()
  File "/x/own.py", line 2, in work
    raise ValueError("no: such thing")
ValueError: no: such thing

\tat org.apache.spark.api.python.BasePythonRunner.handle(PythonRunner.scala:1)
Driver stacktrace: SQLSTATE: XXKST
"""
OURS = PYTHON.replace("ValueError: no: such thing\n", "millstream.errors.OffsetOutOfRange: messages are gone\n")
RAISED = """[STREAM_FAILED] Query [id = 1] terminated with exception: org.apache.spark.SparkRuntimeException: \
[USER_RAISED_EXCEPTION] a row fails in step 2: the value is not JSON SQLSTATE: P0001
\tat org.apache.spark.sql.errors.QueryExecutionErrors$.raiseError(QueryExecutionErrors.scala:1)
"""
ANALYSIS = """[UNRESOLVED_COLUMN.WITH_SUGGESTION] A column with name `ttal` cannot be resolved. Did you mean \
[`total`]? SQLSTATE: 42703; line 1 pos 7;
'Project ['ttal]
"""


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (PYTHON, "ValueError: no: such thing"),
        (OURS, "messages are gone"),
        (PYTHON.replace("ValueError: no: such thing\n", "AssertionError\nIdentifier: q [id = 1]\n"), "AssertionError"),
        (RAISED, "a row fails in step 2: the value is not JSON"),
        (ANALYSIS, "A column with name `ttal` cannot be resolved. Did you mean [`total`]?"),
        ("\n  plain words\nmore", "plain words"),
        ("", "str"),
    ],
)
def test_pages_of_spark_become_one_sentence(text: str, sentence: str) -> None:
    assert sentence_of(text) == sentence
