// Spark pipelines.  Until there are some, the page says how the data can be had.

import { empty, h, heading, replace } from "../dom.js";

export const title = "Pipelines";

export async function show(place) {
  replace(place, heading("Pipelines"), h("p", { class: "lead" }, "Jobs that read topics in bulk and write results back."),
    h("div", { class: "card" }, empty("No pipeline has reported to this broker", "Until one does, any program can follow a topic at ", h("code", {}, "/api/v1/topics/{topic}/stream"), "; see the ", h("a", { href: "/api/v1/docs" }, "HTTP API"), ".")));
}
