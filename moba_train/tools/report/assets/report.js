"use strict";
/* Unpacks plotly.js and draws the charts of #data. Colours come from the style sheet, so that charts follow the theme. */

(async () => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const axisMenu = document.getElementById("progress-axis");
  const hiddenRuns = new Set();
  const AXES = {
    tokens: { title: "tokens", exponentformat: "SI", hoverformat: ".4s" },
    step: { title: "steps", exponentformat: "none", hoverformat: ",d" },
    hours: { title: "hours since the start", exponentformat: "none", hoverformat: ".3~f" },
  };

  const narrow = matchMedia("(max-width: 560px)"); // where a legend has one name in a row and needs room of its own
  const LEGEND_ROW = 14; // pixels
  const PAPER_WIDTH = 680; // pixels of A4 and Letter between their margins
  let printing = false;

  function fail(message) {
    const notice = document.getElementById("failure");
    notice.textContent = message;
    notice.hidden = false;
  }

  /* --- plotly --- */

  async function loadPlotly() {
    const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  }

  /* --- from the page's data to plotly's --- */

  /* A copy of `value` with the style sheet's colours instead of "var(--name)". */
  function coloured(value, style) {
    if (typeof value === "string" && value.startsWith("var(--")) {
      return style.getPropertyValue(value.slice(4, -1)).trim();
    }
    if (Array.isArray(value)) {
      const numbers = value.length > 2 && typeof value[0] === "number"; // a pair may be a step of a colour scale
      return numbers ? value : value.map((inner) => coloured(inner, style));
    }
    if (value !== null && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, coloured(inner, style)]));
    }
    return value;
  }

  function merged(base, over) {
    const result = { ...base };
    for (const [key, value] of Object.entries(over)) {
      const both = value !== null && typeof value === "object" && !Array.isArray(value) && typeof result[key] === "object";
      result[key] = both ? merged(result[key], value) : value;
    }
    return result;
  }

  function traceOf(trace, axis, style) {
    const { axes, ...rest } = trace;
    const result = coloured(rest, style);
    if (axes !== undefined) {
      result.x = (typeof axes === "string" ? data.axes[axes] : axes)[axis];
    }
    if (result.meta && hiddenRuns.has(result.meta.run)) {
      result.visible = false;
    }
    return result;
  }

  function baseLayout(chart, axis, style) {
    const colour = (name) => style.getPropertyValue(name).trim();
    const lines = { gridcolor: colour("--grid"), linecolor: colour("--line"), zeroline: false, automargin: true, ticks: "" };
    const text = { color: colour("--muted"), size: 12 };
    return {
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: colour("--font"), color: colour("--ink"), size: 12 },
      margin: { l: 8, r: 12, t: 30, b: 8 },
      hovermode: "x unified",
      hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--line"), font: { color: colour("--ink"), size: 12 } },
      legend: { orientation: "h", x: 0, xanchor: "left", yref: "container", y: 0, yanchor: "bottom", font: { color: colour("--ink") }, bgcolor: "rgba(0,0,0,0)" },
      xaxis: { ...lines, tickfont: text, ...(chart.progress ? AXES[axis] : {}) },
      yaxis: { ...lines, tickfont: text },
      dragmode: "zoom",
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--line"), activecolor: colour("--muted") },
    };
  }

  /* Titles may be texts; plotly wants objects. */
  function withTitles(layout, style) {
    for (const name of ["xaxis", "yaxis"]) {
      if (typeof layout[name].title === "string") {
        const font = { size: 12, color: style.getPropertyValue("--muted").trim() };
        layout[name].title = { text: layout[name].title, font, standoff: 8 };
      }
    }
    return layout;
  }

  function stageLines(chart, axis, style) {
    const shapes = [];
    const annotations = [];
    for (const mark of chart.marks.filter((mark) => !hiddenRuns.has(mark.run))) {
      const x = mark.axes[axis][0];
      const line = { color: style.getPropertyValue("--muted").trim(), width: 1, dash: "dot" };
      shapes.push({ type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1, line, layer: "below" });
      if (mark.run === 0) {
        annotations.push({
          x, y: 1, yref: "paper", yanchor: "bottom", xanchor: "left", showarrow: false,
          text: mark.label, font: { size: 11, color: style.getPropertyValue("--muted").trim() },
        });
      }
    }
    return { shapes, annotations };
  }

  async function draw(chart) {
    const style = getComputedStyle(root);
    const axis = axisMenu.value;
    const own = coloured(chart.layout, style);
    const layout = withTitles(merged(baseLayout(chart, axis, style), own), style);
    const lines = stageLines(chart, axis, style);
    layout.shapes = [...lines.shapes, ...(own.shapes || [])];
    layout.annotations = [...lines.annotations, ...(own.annotations || [])];
    const traces = chart.traces.map((trace) => traceOf(trace, axis, style));
    const named = traces.filter((trace) => trace.name && trace.showlegend !== false).length;
    if (printing) {
      layout.width = PAPER_WIDTH;
    }
    layout.height = chart.height + (narrow.matches && named > 2 ? LEGEND_ROW * named : 0);
    document.getElementById(`chart-${chart.key}`).style.height = `${layout.height}px`;
    const modes = { responsive: true, displaylogo: false, displayModeBar: "hover", modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"] };
    await Plotly.react(`chart-${chart.key}`, traces, layout, modes);
  }

  /* Without a pause: the browser prints as soon as this returns. */
  function drawAll() {
    return Promise.all(data.charts.map(draw));
  }

  /* --- controls --- */

  const dark = matchMedia("(prefers-color-scheme: dark)");

  function setTheme(name) {
    root.dataset.theme = name;
    if (window.Plotly) {
      drawAll();
    }
  }

  function listen() {
    document.getElementById("theme").addEventListener("click", () => setTheme(root.dataset.theme === "dark" ? "light" : "dark"));
    dark.addEventListener("change", (event) => setTheme(event.matches ? "dark" : "light"));
    let before = null;
    addEventListener("beforeprint", () => {
      before = root.dataset.theme;
      printing = true;
      setTheme("light");
    });
    addEventListener("afterprint", () => {
      printing = false;
      setTheme(before);
      for (const chart of data.charts) {
        Plotly.Plots.resize(`chart-${chart.key}`); // plotly keeps the width of before otherwise
      }
    });
    axisMenu.addEventListener("change", drawAll);
    narrow.addEventListener("change", drawAll);
    for (const box of document.querySelectorAll("input[data-run]")) {
      box.addEventListener("change", () => {
        hiddenRuns[box.checked ? "delete" : "add"](Number(box.dataset.run));
        drawAll();
      });
    }
    document.getElementById("search")?.addEventListener("input", (event) => {
      const wanted = event.target.value.toLowerCase();
      for (const row of document.querySelectorAll("#recipe tbody tr")) {
        row.hidden = !row.textContent.toLowerCase().includes(wanted);
      }
    });
  }

  root.dataset.theme = dark.matches ? "dark" : "light";
  listen();
  if (!("DecompressionStream" in window)) {
    fail("The charts need a browser of 2023 or newer (Chrome 80, Firefox 113, Safari 16.4); the tables are complete.");
    return;
  }
  try {
    await loadPlotly();
    await drawAll();
    root.dataset.ready = "true";
  } catch (error) {
    fail(`The charts cannot be drawn: ${error}`);
    throw error;
  }
})();
