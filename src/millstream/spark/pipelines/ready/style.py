"""How reports look: the colours of the dashboard, light and dark as the reader's machine has it."""

from __future__ import annotations

from typing import Final

__all__ = ["STYLE"]

_PALETTE_LIGHT: Final = (
    "--paper:#f5f7f9;--card:#fff;--ink:#14202b;--soft:#52616f;--line:#dce3e9;--hover:#edf2f5;--good:#166534;"
    "--warn:#854d0e;--bad:#b01c1c;--one:#0f8b80;--two:#c46a05;--three:#3f6ae0;--four:#b0378a;--five:#6b7f1a;"
    "--six:#7a4fc4;--rest:#94a3b0;--code:#e9eef2;color-scheme:light"
)
_PALETTE_DARK: Final = (
    "--paper:#0f151b;--card:#172029;--ink:#e6edf3;--soft:#a3b1be;--line:#2a3742;--hover:#202c36;--good:#5fdf8f;"
    "--warn:#f5c542;--bad:#fb8a8a;--one:#2dd4bf;--two:#f5a742;--three:#7c9cff;--four:#ee85c8;--five:#b9cf5a;"
    "--six:#b79bf5;--rest:#66788a;--code:#22303b;color-scheme:dark"
)
_COLOURS: Final = "".join(
    f"svg .{name}{{fill:var(--{name})}}svg .line.{name}{{fill:none;stroke:var(--{name})}}"
    f".legend i.{name}{{background:var(--{name})}}"
    for name in ("one", "two", "three", "four", "five", "six", "rest", "bad", "good")
)
STYLE: Final = (
    f":root{{{_PALETTE_LIGHT}}}@media (prefers-color-scheme:dark){{:root{{{_PALETTE_DARK}}}}}{_COLOURS}"
    """
* { box-sizing:border-box }
body { margin:0;background:var(--paper);color:var(--ink);font:14.5px/1.5 system-ui,"Segoe UI",Roboto,sans-serif }
main { max-width:1120px;margin:0 auto;padding:32px 24px 48px }
h1 { font-size:25px;line-height:1.25;letter-spacing:-.01em;margin:0 }
h2 { font-size:16.5px;margin:30px 0 8px }
.lead { color:var(--soft);margin:4px 0 18px;max-width:85ch }
.soft { color:var(--soft);margin:-4px 0 10px;max-width:95ch }
code { font:12.8px ui-monospace,"SF Mono","DejaVu Sans Mono",Menlo,Consolas,monospace; background:var(--code);
    border-radius:4px; padding:1px 4px; overflow-wrap:anywhere; }
.card,.table { background:var(--card);border:1px solid var(--line);border-radius:10px }
.card { padding:14px 16px }
.empty { color:var(--soft);text-align:center;padding:26px }
.figures { display:grid;grid-template-columns:repeat(auto-fit,minmax(165px,1fr));gap:12px }
.figure .label,.figure .note { color:var(--soft);font-size:13px }
.figure .value { font-size:25px; font-weight:640; line-height:1.3; font-variant-numeric:tabular-nums;
    overflow-wrap:anywhere; }
.figure.good { border-left:4px solid var(--good) }
.figure.warn { border-left:4px solid var(--warn) }
.figure.bad { border-left:4px solid var(--bad) }
.findings { list-style:none; margin:16px 0 0; padding:0; background:var(--card); border:1px solid var(--line);
    border-radius:10px; overflow:hidden; }
.findings li { padding:8px 16px;border-left:4px solid var(--rest);overflow-wrap:anywhere }
.findings li+li { border-top:1px solid var(--line) }
.findings .good { border-left-color:var(--good) }
.findings .warn { border-left-color:var(--warn) }
.findings .bad { border-left-color:var(--bad) }
.beside { display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,340px),1fr));gap:0 18px }
.beside section { min-width:0 }
.plot { display:block;width:100%;height:auto }
.grid { stroke:var(--line) }
.axis { fill:var(--soft);font-size:11.5px;text-anchor:middle }
.axis.end { text-anchor:end }
.line { stroke-width:2 }
.plot g:hover rect { opacity:.75 }
.legend { display:flex;flex-wrap:wrap;gap:2px 18px;margin:0 0 8px;font-size:13px;color:var(--soft) }
.legend span { max-width:46ch;overflow:hidden;text-overflow:ellipsis;white-space:nowrap }
.legend i { display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:6px }
.bar { display:grid; grid-template-columns:minmax(90px,44%) 1fr minmax(70px,max-content); gap:12px;
    align-items:center; padding:3px 0; }
.bar svg { width:100%;height:14px;border-radius:2px }
.bar .name { overflow:hidden;text-overflow:ellipsis;white-space:nowrap }
.bar .number { text-align:right;font-variant-numeric:tabular-nums }
.bar i { color:var(--soft);font-style:normal;font-size:12.5px }
.spark { width:120px;height:24px;display:block }
.table { overflow-x:auto }
table { border-collapse:collapse;width:100%;font-size:14px }
th,td { text-align:left;padding:8px 14px;border-bottom:1px solid var(--line);vertical-align:top }
th { font-size:12.5px;color:var(--soft);font-weight:600;white-space:nowrap }
td.num,th.num { text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap }
td.time { min-width:106px;font-variant-numeric:tabular-nums }
tr:last-child td { border-bottom:0 }
tbody tr:hover { background:var(--hover) }
td small { color:var(--soft);font-size:12.8px }
.wide { min-width:280px }
footer { margin-top:36px;color:var(--soft);font-size:13px }
@media print { body{background:#fff}.card,.table,.findings{break-inside:avoid} }
"""
).replace("\n", "")
