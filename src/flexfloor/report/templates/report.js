"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const arrays = { i1: Int8Array, u1: Uint8Array, i2: Int16Array, u2: Uint16Array, i4: Int32Array, u4: Uint32Array,
    f4: Float32Array, f8: Float64Array };

  // An array as plotly writes it: a list, or base64 of its bytes.
  function values(data) {
    if (!data || !data.bdata) return data;
    return new arrays[data.dtype](Uint8Array.from(atob(data.bdata), (c) => c.charCodeAt(0)).buffer);
  }

  function colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }

  // Colours that the page's theme decides.
  function theme() {
    const look = { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", "font.color": colour("--text"),
      "hoverlabel.bgcolor": colour("--panel"), "hoverlabel.bordercolor": colour("--rule"),
      "hoverlabel.font.color": colour("--text") };
    for (const axis of ["xaxis", "yaxis", "yaxis2"]) {
      look[axis + ".gridcolor"] = colour("--grid");
      look[axis + ".linecolor"] = colour("--rule");
      look[axis + ".zerolinecolor"] = colour("--rule");
    }
    return look;
  }

  function set(layout, path, value) {
    const keys = path.split(".");
    const last = keys.pop();
    let at = layout;
    for (const key of keys) {
      if (!(key in at)) {
        if (key.startsWith("yaxis2")) return;
        at[key] = {};
      }
      at = at[key];
    }
    at[last] = value;
  }

  // What a pointer on a bin of the Gantt chart shows.
  function describe(trace) {
    if (!trace.meta || !trace.meta.states) return;
    const edges = values(trace.x), state = values(trace.z), live = values(trace.customdata);
    const digits = Math.max(0, Math.min(6, Math.ceil(-Math.log10(edges[edges.length - 1] / edges.length))));
    const count = edges.length - 1;
    const spans = Array.from({ length: count }, (_, i) => edges[i].toFixed(digits) + "–" + edges[i + 1].toFixed(digits) + " s");
    trace.text = trace.meta.rows.map((row, r) => spans.map((span, i) =>
      row + "<br>" + span + "<br>" + trace.meta.states[state[r * count + i]] + ", " + live[r * count + i] + " live requests"));
    delete trace.customdata;
  }

  function draw(place) {
    const figure = figures[place.id];
    for (const trace of figure.data) describe(trace);
    Object.assign(figure.layout, { autosize: true, font: { family: getComputedStyle(document.body).fontFamily, size: 12 },
      dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom" });
    for (const axis of ["xaxis", "yaxis", "yaxis2"]) {
      if (figure.layout[axis]) Object.assign(figure.layout[axis], { automargin: true, ticks: "" });
    }
    for (const [path, value] of Object.entries(theme())) set(figure.layout, path, value);
    return Plotly.newPlot(place, figure.data, figure.layout, { responsive: true, displayModeBar: false });
  }

  // From the top down, so that the first ones are there soon; the page can be read and scrolled meanwhile.
  async function drawAll() {
    const places = Array.from(document.querySelectorAll(".chart"))
      .filter((place) => !place.layout && !place.closest("details:not([open])"));
    for (const place of places) {
      await draw(place);
      await new Promise((next) => setTimeout(next));
    }
    document.body.dataset.drawn = Number(document.body.dataset.drawn || 0) + places.length;
  }

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const name of Object.keys(figures)) {
      const place = document.getElementById(name);
      if (!place.layout) continue;
      const look = theme();
      for (const path of Object.keys(look)) if (path.startsWith("yaxis2") && !place.layout.yaxis2) delete look[path];
      Plotly.relayout(place, look);
    }
  });
  // What is folded has no width to draw to.
  for (const fold of document.querySelectorAll("details.fold")) fold.addEventListener("toggle", drawAll);
  // A link to something folded opens it.
  addEventListener("hashchange", () => {
    const fold = document.getElementById(location.hash.slice(1))?.querySelector("details.fold");
    if (fold) fold.open = true;
  });
  drawAll();
})();
