// Curves over steps, and the bar of steps with a link to each step.

import type { ComponentChildren } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { useLocation, useSearch } from "wouter-preact";
import { query, type Words } from "./api";
import { number, seconds } from "./parts";
import { explained } from "./words";

export interface Line {
  label: string;
  x: number[];
  y: (number | null)[];
  /** Ends of the band around the line, and what it holds. */
  low?: (number | null)[];
  high?: (number | null)[];
  band?: string;
}

/** A step to mark, with the words for it. */
export interface Mark {
  step: number;
  kind: "alarm" | "evaluation";
  text: string;
}

/** How curves are drawn: shared by all of a page, and kept in its address. */
export interface View {
  smooth: number;
  log: boolean;
  from: number | null;
  to: number | null;
}

const HEIGHT = 132;

function style(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** Ticks with as many digits as tell them apart. */
function tickTexts(_: uPlot, ticks: (number | null)[], __: number, ___: number, step: number): string[] {
  let digits = 0;
  while (digits < 8 && Math.abs(step * 10 ** digits - Math.round(step * 10 ** digits)) > 1e-6) digits += 1;
  return ticks.map((tick) => {
    if (!tick) return tick === 0 ? "0" : "";
    const size = Math.abs(tick);
    if (size >= 1e5 || size < 1e-3) return tick.toExponential(step && size > 10 * step ? 1 : 0);
    return step ? tick.toFixed(digits) : String(Number(tick.toPrecision(3)));
  });
}

function colour(at: number): string {
  return style(`--line-${at % 8}`);
}

/** Exponential moving average whose first values are not drawn to zero. */
export function smoothed(values: (number | null)[], weight: number): (number | null)[] {
  let [sum, norm] = [0, 0];
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

interface Drawn {
  of: number;
  role: "line" | "raw" | "low" | "high";
  line: Line;
  y: (number | null)[];
}

/** The columns of a chart: each line with its unsmoothed values and its band. */
function drawn(lines: Line[], view: View): Drawn[] {
  const positive = (values: (number | null)[]) =>
    view.log ? values.map((value) => (value !== null && value > 0 ? value : null)) : values;
  return lines.flatMap((line, of) => {
    const columns: Drawn[] = [];
    if (line.low && line.high) {
      columns.push({ of, line, role: "low", y: positive(line.low) }, { of, line, role: "high", y: positive(line.high) });
    }
    if (view.smooth > 0) columns.push({ of, line, role: "raw", y: positive(line.y) });
    columns.push({ of, line, role: "line", y: positive(view.smooth > 0 ? smoothed(line.y, view.smooth) : line.y) });
    return columns;
  });
}

function table(columns: Drawn[]): uPlot.AlignedData {
  const tables = columns.map((one) => [one.line.x, one.y] as uPlot.AlignedData);
  return tables.length === 1 ? (tables[0] as uPlot.AlignedData) : uPlot.join(tables);
}

interface Pointed {
  step: number;
  left: number;
  values: (number | null | undefined)[];
  marks: Mark[];
}

interface CurveProps {
  words: Words;
  lines: Line[];
  view: View;
  marks?: Mark[];
  /** What a point stands for, in the legend; "each step" if not given. */
  each?: string;
  onStep?: (step: number) => void;
  onZoom: (from: number | null, to: number | null) => void;
}

/** One chart: the pointer shows values, a click opens the step under it, a drag zooms in. */
export function Curve(props: CurveProps) {
  const place = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const { lines, words, view } = props;
  const marks = props.marks ?? [];
  const [hidden, hide] = useState<string[]>([]);
  const [pointed, point] = useState<Pointed | null>(null);
  const columns = drawn(lines, view);
  const shape = JSON.stringify([columns.map((one) => [one.of, one.role, one.line.label]), view.log]);
  const latest = useRef({ ...props, marks, columns });
  latest.current = { ...props, marks, columns };
  useEffect(() => {
    const element = place.current;
    if (!element) return;
    const made = new uPlot(optionsOf(element, columns, view, latest, point), table(columns), element);
    plot.current = made;
    const resized = new ResizeObserver(() => {
      if (element.clientWidth !== made.width) made.setSize({ width: element.clientWidth, height: HEIGHT });
    });
    resized.observe(element);
    return () => {
      resized.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [shape]);
  useEffect(() => {
    const made = plot.current;
    if (!made) return;
    made.batch(() => {
      made.setData(table(columns));
      if (view.from !== null && view.to !== null) made.setScale("x", { min: view.from, max: view.to });
      columns.forEach((one, at) => made.setSeries(at + 1, { show: !hidden.includes(one.line.label) }));
    });
  }, [lines, view, hidden, shape, marks.length]);
  const last = lines.map((line) => line.y[line.y.length - 1]).find((value) => value !== null);
  const toggle = (label: string) =>
    hide(hidden.includes(label) ? hidden.filter((one) => one !== label) : [...hidden, label]);
  return (
    <figure class="curve">
      <figcaption>
        <span title={explained(words)}>{words.name}</span>
        {lines.length === 1 && <span class="last"><b>{number(last)}</b> <span class="quiet">{words.unit}</span></span>}
      </figcaption>
      <div class="plot">
        <div ref={place} role="img" aria-label={`${words.name} by step; last ${number(last)} ${words.unit}`} />
        {pointed && (
          <div class={pointed.left > 0.5 ? "pointed to-left" : "pointed"} style={{ left: `${100 * pointed.left}%` }}>
            <b>step {pointed.step}</b>
            {columns.map((one, at) => hidden.includes(one.line.label) || pointed.values[at] == null ? null : (
              <span key={`${one.of} ${one.role}`}>
                <span class={`swatch line-${one.of % 8}`} aria-hidden="true" />
                {{ line: view.smooth > 0 ? `${one.line.label}, smoothed` : one.line.label, raw: one.line.label, low: "lowest", high: "highest" }[one.role]}{" "}
                <b>{number(pointed.values[at], 4)}</b>
              </span>
            ))}
            {pointed.marks.map((mark) => (
              <span key={mark.text} class={mark.kind}>{mark.kind === "alarm" ? "▼" : "┊"} {mark.text}</span>
            ))}
          </div>
        )}
      </div>
      <ul class="legend">
        {lines.map((line, at) => (
          <li key={line.label}>
            {lines.length > 1 ? (
              <button type="button" class="ghost" aria-pressed={!hidden.includes(line.label)} onClick={() => toggle(line.label)}>
                <span class={`swatch line-${at % 8}`} aria-hidden="true" />{line.label}
              </button>
            ) : (
              <><span class="swatch line-0" aria-hidden="true" />{view.smooth > 0 ? "smoothed" : props.each ?? "each step"}</>
            )}
          </li>
        ))}
        {[...new Set(lines.flatMap((line) => (line.low && line.band ? [line.band] : [])))].map((band) => (
          <li key={band}><span class="swatch banded" aria-hidden="true" />{band}</li>
        ))}
        {marks.some((one) => one.kind === "alarm") && <li><span class="alarm" aria-hidden="true">▼</span> alarm</li>}
        {marks.some((one) => one.kind === "evaluation") && <li><span aria-hidden="true">┊</span> evaluation</li>}
      </ul>
    </figure>
  );
}

type Latest = { current: CurveProps & { marks: Mark[]; columns: Drawn[] } };

function optionsOf(
  element: HTMLElement, columns: Drawn[], view: View, latest: Latest, point: (at: Pointed | null) => void,
): uPlot.Options {
  const axis = { stroke: style("--quiet"), grid: { stroke: style("--line"), width: 1 }, ticks: { stroke: style("--line") } };
  const isFew = columns.every((one) => one.line.x.length <= 40);
  return {
    width: element.clientWidth,
    height: HEIGHT,
    scales: { x: { time: false }, y: view.log ? { distr: 3 } : {} },
    legend: { show: false },
    cursor: { y: false, sync: { key: "steps" }, drag: { x: true, y: false, setScale: false } },
    axes: [{ ...axis, size: 30 }, { ...axis, size: 56, values: tickTexts }],
    series: [
      {},
      ...columns.map((one) => ({
        stroke: colour(one.of) + { line: "", raw: "55", low: "00", high: "00" }[one.role],
        width: one.role === "line" ? 1.5 : 1,
        spanGaps: true,
        points: { show: one.role === "line" && isFew, size: 5 },
      })),
    ],
    bands: columns.flatMap((one, at) =>
      one.role === "high" ? [{ series: [at + 1, at] as [number, number], fill: `${colour(one.of)}2e` }] : [],
    ),
    hooks: {
      setCursor: [(self) => point(self.over.matches(":hover") ? pointedAt(self, latest.current.marks) : null)],
      setSelect: [
        (self) => {
          const { left, width } = self.select;
          if (width < 4 || !self.over.matches(":hover")) return;
          latest.current.onZoom(Math.floor(self.posToVal(left, "x")), Math.ceil(self.posToVal(left + width, "x")));
          self.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
        },
      ],
      draw: [(self) => drawMarks(self, latest.current.marks)],
      ready: [(self) => listen(self, latest)],
    },
  };
}

/** A click opens the step under the pointer, unless it ends a drag; a double click shows all steps. */
function listen(plot: uPlot, latest: Latest): void {
  let pressed = 0;
  let opening = 0;
  plot.over.addEventListener("mousedown", (event) => { pressed = event.clientX; });
  plot.over.addEventListener("click", (event) => {
    const at = plot.cursor.idx;
    const step = at === null || at === undefined ? undefined : plot.data[0][at];
    const { onStep } = latest.current;
    if (step === undefined || !onStep || Math.abs(event.clientX - pressed) >= 4) return;
    window.clearTimeout(opening);
    // Waits for the second click of a double one.
    opening = window.setTimeout(() => onStep(step), latest.current.view.from === null ? 0 : 250);
  });
  plot.over.addEventListener("dblclick", () => {
    window.clearTimeout(opening);
    latest.current.onZoom(null, null);
  });
}

function drawMarks(plot: uPlot, marks: Mark[]): void {
  const { ctx, bbox } = plot;
  ctx.save();
  for (const mark of marks) {
    const x = plot.valToPos(mark.step, "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    const size = 5 * devicePixelRatio;
    ctx.beginPath();
    if (mark.kind === "alarm") {
      ctx.fillStyle = style("--bad");
      ctx.moveTo(x - size, bbox.top);
      ctx.lineTo(x + size, bbox.top);
      ctx.lineTo(x, bbox.top + 1.6 * size);
      ctx.fill();
    } else {
      ctx.strokeStyle = `${style("--quiet")}88`;
      ctx.setLineDash([2, 5]);
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
  }
  ctx.restore();
}

function pointedAt(plot: uPlot, marks: Mark[]): Pointed | null {
  const at = plot.cursor.idx;
  if (at === null || at === undefined) return null;
  const [steps, ...lines] = plot.data;
  const step = steps[at];
  if (step === undefined) return null;
  const x = plot.valToPos(step, "x") + plot.over.offsetLeft;
  // A mark between two points belongs to the one after it.
  const before = steps[at - 1] ?? -1;
  const near = marks.filter((mark) => mark.step > before && mark.step <= step);
  return { step, left: x / plot.width, values: lines.map((line) => line[at]), marks: near };
}

const WEIGHTS: [number, string][] = [[0, "none"], [0.6, "some"], [0.9, "much"], [0.97, "most"]];

/** The view of a page's curves, kept in its address, and a function that changes it. */
export function useCurveView(): [View, (changes: Partial<View>) => void] {
  const given = new URLSearchParams(useSearch());
  const [path, go] = useLocation();
  const whole = (name: string) => (/^\d+$/.test(given.get(name) ?? "") ? Number(given.get(name)) : null);
  const smooth = Number(given.get("smooth") ?? 0);
  const view: View = {
    smooth: smooth > 0 && smooth < 1 ? smooth : 0,
    log: given.get("log") === "1",
    from: whole("from"),
    to: whole("to"),
  };
  const set = (changes: Partial<View>) => {
    const next = { ...view, ...changes };
    const others = Object.fromEntries([...given].filter(([name]) => !(name in view)));
    go(path + query({
      ...others, smooth: next.smooth || null, log: next.log ? 1 : null, from: next.from, to: next.to,
    }), { replace: true });
  };
  const stable = useMemo(() => view, [view.smooth, view.log, view.from, view.to]);
  return [stable, set];
}

export function CurveTools(props: { view: View; set: (changes: Partial<View>) => void; children?: ComponentChildren }) {
  const { view, set } = props;
  const [from, setFrom] = useState("");
  const [to, setTo] = useState("");
  useEffect(() => {
    setFrom(view.from === null ? "" : String(view.from));
    setTo(view.to === null ? "" : String(view.to));
  }, [view.from, view.to]);
  const zoom = () => {
    const ends = [Number(from), Number(to)] as const;
    if (from && to && ends[0] < ends[1]) set({ from: Math.max(0, ends[0]), to: ends[1] });
  };
  return (
    <form class="row curve-tools" onSubmit={(event) => { event.preventDefault(); zoom(); }}>
      <label class="field inline"><span>Smoothing</span>
        <select value={String(view.smooth)} onChange={(event) => set({ smooth: Number(event.currentTarget.value) })}>
          {WEIGHTS.map(([weight, name]) => <option key={name} value={String(weight)}>{name}</option>)}
        </select>
      </label>
      <label class="field inline">
        <input type="checkbox" checked={view.log} onChange={(event) => set({ log: event.currentTarget.checked })} />
        <span>Log scale</span>
      </label>
      <label class="field inline"><span>Steps from</span>
        <input class="short" inputMode="numeric" value={from} onInput={(event) => setFrom(event.currentTarget.value)} />
      </label>
      <label class="field inline"><span>to</span>
        <input class="short" inputMode="numeric" value={to} onInput={(event) => setTo(event.currentTarget.value)} />
      </label>
      <button type="submit">Zoom</button>
      <button type="button" disabled={view.from === null} onClick={() => set({ from: null, to: null })}>All steps</button>
      {props.children}
    </form>
  );
}

export function Legend({ names }: { names: string[] }) {
  return (
    <ul class="legend">
      {names.map((name, at) => (
        <li key={name}>
          <span class={`swatch line-${at % 8}`} aria-hidden="true" />
          {name}
        </li>
      ))}
    </ul>
  );
}

/** The phases of each of the last steps as stacked times; every bar links to its step. */
export function StepBar(props: {
  steps: number[];
  phases: Record<string, number>[];
  href: (step: number) => string;
  go: (step: number) => void;
}) {
  const { steps, phases } = props;
  const sums: Record<string, number> = {};
  for (const step of phases) {
    for (const [name, spent] of Object.entries(step)) sums[name] = (sums[name] ?? 0) + spent;
  }
  const names = Object.keys(sums).sort((one, other) => (sums[other] ?? 0) - (sums[one] ?? 0));
  const totals = phases.map((step) => Object.values(step).reduce((sum, spent) => sum + spent, 0));
  const most = Math.max(...totals, 1e-9);
  return (
    <>
      <div class="step-bar">
        {steps.map((step, at) => (
          <a
            key={step}
            href={props.href(step)}
            title={`step ${step}: ${seconds(totals[at] ?? 0)}`}
            aria-label={`Step ${step}, ${seconds(totals[at] ?? 0)}`}
            onClick={(event) => {
              if (event.metaKey || event.ctrlKey) return;
              event.preventDefault();
              props.go(step);
            }}
          >
            {names.map((name, colourAt) => {
              const spent = phases[at]?.[name] ?? 0;
              return spent > 0 ? (
                <span
                  key={name}
                  class={`line-${colourAt % 8}`}
                  style={{ height: `${(100 * spent) / most}%` }}
                />
              ) : null;
            })}
          </a>
        ))}
      </div>
      <Legend names={names.map((name) => `${name.replace(/_/g, " ")} ${seconds(sums[name] ?? 0)}`)} />
    </>
  );
}
