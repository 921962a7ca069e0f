// Curves over steps, and the bar of steps with a link to each step.

import { useEffect, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import type { Words } from "./api";
import { number, seconds } from "./parts";
import { explained } from "./words";

export interface Line {
  label: string;
  x: number[];
  y: (number | null)[];
}

const HEIGHT = 132;

function style(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function short(tick: number): string {
  return Math.abs(tick) >= 1e4 || (tick !== 0 && Math.abs(tick) < 1e-3)
    ? tick.toExponential(0)
    : String(Number(tick.toPrecision(3)));
}

function colour(at: number): string {
  return style(`--line-${at % 8}`);
}

function table(lines: Line[]): uPlot.AlignedData {
  const tables = lines.map((line) => [line.x, line.y] as uPlot.AlignedData);
  return tables.length === 1 ? (tables[0] as uPlot.AlignedData) : uPlot.join(tables);
}

interface Pointed {
  step: number;
  left: number;
  values: (number | null | undefined)[];
}

/** One chart; the pointer shows step and values, a click calls `onStep` with the step under it. */
export function Curve(props: { words: Words; lines: Line[]; onStep?: (step: number) => void }) {
  const place = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const { lines, onStep, words } = props;
  const [pointed, point] = useState<Pointed | null>(null);
  const names = lines.map((line) => line.label).join("\n");
  const click = useRef(onStep);
  click.current = onStep;
  useEffect(() => {
    const element = place.current;
    if (!element) return;
    const axis = { stroke: style("--quiet"), grid: { stroke: style("--line"), width: 1 }, ticks: { stroke: style("--line") } };
    const made = new uPlot(
      {
        width: element.clientWidth,
        height: HEIGHT,
        scales: { x: { time: false } },
        legend: { show: false },
        cursor: { y: false, sync: { key: "steps" } },
        axes: [{ ...axis, size: 30 }, { ...axis, size: 52, values: (_, ticks) => ticks.map(short) }],
        series: [
          {},
          ...names.split("\n").map((label, at) => ({
            label,
            stroke: colour(at),
            width: 1.5,
            spanGaps: true,
            points: { show: lines[at]?.x.length === 1, size: 5 },
          })),
        ],
        hooks: {
          setCursor: [(self) => point(self.over.matches(":hover") ? pointedAt(self) : null)],
          ready: [
            (self) =>
              self.over.addEventListener("click", () => {
                const at = self.cursor.idx;
                const step = at === null || at === undefined ? null : self.data[0][at];
                if (step !== null && step !== undefined) click.current?.(step);
              }),
          ],
        },
      },
      table(lines),
      element,
    );
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
  }, [names]);
  useEffect(() => {
    plot.current?.setData(table(lines));
  }, [lines]);
  const last = lines.map((line) => line.y[line.y.length - 1]).find((value) => value !== null);
  return (
    <figure class="curve">
      <figcaption>
        <span title={explained(words)}>{lines.length === 1 && <span class="swatch line-0" aria-hidden="true" />}{words.name}</span>
        {lines.length === 1 && <span class="last"><b>{number(last)}</b> <span class="quiet">{words.unit}</span></span>}
      </figcaption>
      <div class="plot">
        <div ref={place} role="img" aria-label={`${words.name} by step; last ${number(last)} ${words.unit}`} />
        {pointed && (
          <div class={pointed.left > 0.5 ? "pointed to-left" : "pointed"} style={{ left: `${100 * pointed.left}%` }}>
            <b>step {pointed.step}</b>
            {lines.map((line, at) => (
              <span key={line.label}>
                <span class={`swatch line-${at % 8}`} aria-hidden="true" />
                {line.label} <b>{number(pointed.values[at], 4)}</b>
              </span>
            ))}
          </div>
        )}
      </div>
      {lines.length > 1 && <Legend names={lines.map((line) => line.label)} />}
    </figure>
  );
}

function pointedAt(plot: uPlot): Pointed | null {
  const at = plot.cursor.idx;
  if (at === null || at === undefined) return null;
  const [steps, ...lines] = plot.data;
  const step = steps[at];
  if (step === undefined) return null;
  const x = plot.valToPos(step, "x") + plot.over.offsetLeft;
  return { step, left: x / plot.width, values: lines.map((line) => line[at]) };
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

const SHOWN_STEPS = 120;

/** The phases of each of the last steps as stacked times; every bar links to its step. */
export function StepBar(props: {
  steps: number[];
  phases: Record<string, number>[];
  href: (step: number) => string;
  go: (step: number) => void;
}) {
  const first = Math.max(0, props.steps.length - SHOWN_STEPS);
  const steps = props.steps.slice(first);
  const phases = props.phases.slice(first);
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
