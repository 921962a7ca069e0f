// Small components shared by all pages.

import type { ComponentChildren, JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import { Link } from "wouter-preact";
import { query } from "./api";

export function runPath(run: string): string {
  return `/runs/${encodeURIComponent(run)}`;
}

export function recordPath(run: string, id: string, more: Record<string, string> = {}): string {
  return `${runPath(run)}/record${query({ id, ...more })}`;
}

export function groupPath(run: string, task: string): string {
  return `${runPath(run)}/group${query({ task })}`;
}

export function diffPath(run: string, one: string | undefined, other: string | undefined): string {
  return `${runPath(run)}/diff${query({ a: one, b: other })}`;
}

export function stepPath(run: string, step: number): string {
  return `${runPath(run)}/step/${step}`;
}

export function number(value: number | null | undefined, digits = 3): string {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 1e6)) return value.toExponential(2);
  return size >= 100 ? value.toLocaleString("en", { maximumFractionDigits: 0 }) : value.toFixed(digits);
}

export function bytes(value: number): string {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let size = value;
  let unit = 0;
  while (size >= 1000 && unit < units.length - 1) {
    size /= 1000;
    unit += 1;
  }
  return `${size >= 100 || unit === 0 ? Math.round(size) : size.toFixed(1)} ${units[unit]}`;
}

export function seconds(value: number): string {
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 120) return `${value.toFixed(1)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

export function between(from: string | null, to: string | null): number | null {
  return from && to ? (Date.parse(to) - Date.parse(from)) / 1000 : null;
}

export function Ago({ at, now }: { at: string | null | undefined; now?: string }) {
  if (!at) return <span>–</span>;
  const passed = Math.max(0, ((now ? Date.parse(now) : Date.now()) - Date.parse(at)) / 1000);
  return <time dateTime={at} title={at}>{`${seconds(passed)} ago`}</time>;
}

export function Badge({ kind, children }: { kind: string; children: ComponentChildren }) {
  return <span class={`badge badge-${kind}`}>{children}</span>;
}

const KINDS: Record<string, string> = {
  training: "good",
  up: "good",
  sampling: "good",
  running: "good",
  trained: "good",
  scored: "good",
  completed: "plain",
  created: "plain",
  failed: "bad",
  down: "bad",
  unreadable: "bad",
  no_signal: "bad",
  interrupted: "warn",
  dropped: "warn",
  updating: "warn",
  asleep: "warn",
};

export function Status({ value }: { value: string }) {
  return <Badge kind={KINDS[value] ?? "plain"}>{value.replace("_", " ")}</Badge>;
}

/** The mark of a run whose documents come from another installation. */
export function Imported() {
  return (
    <span title="Imported with `agentrl store import`: another installation wrote its documents, and nothing here runs what they name.">
      <Badge kind="warn">imported</Badge>
    </span>
  );
}

/** The class of a score's colour, on a scale from 0 to 1; scores outside the scale are clamped. */
export function scoreClass(score: number | null | undefined): string {
  if (score === null || score === undefined) return "score-none";
  return `score-${Math.round(Math.min(1, Math.max(0, score)) * 4)}`;
}

export function ScoreChip({ score }: { score: number | null | undefined }) {
  return (
    <span class={`chip ${scoreClass(score)}`} title={score === null ? "no score" : String(score)}>
      {score === null || score === undefined ? "–" : number(score, 2)}
    </span>
  );
}

export function Loading() {
  // The text appears after a delay, so that fast answers do not flicker.
  const [shown, show] = useState(false);
  useEffect(() => {
    const timer = window.setTimeout(() => show(true), 300);
    return () => window.clearTimeout(timer);
  }, []);
  return <p class="quiet" role="status">{shown ? "Loading…" : ""}</p>;
}

export function Problem({ text }: { text: string }) {
  return <p class="problem" role="alert">{text}</p>;
}

export function Section(props: {
  title: string;
  hint?: string;
  aside?: ComponentChildren;
  children: ComponentChildren;
  class?: string;
}) {
  return (
    <section class={`card ${props.class ?? ""}`}>
      <div class="card-head">
        <h2 title={props.hint}>{props.title}</h2>
        {props.aside}
      </div>
      {props.children}
    </section>
  );
}

/** A row of facts: its name, its value, and the sentences on its name. */
export type Fact = [string, ComponentChildren, string?];

export function Facts({ rows, wide }: { rows: Fact[]; wide?: boolean }) {
  return (
    <dl class={wide ? "facts wide" : "facts"}>
      {rows.map(([name, value, hint]) => (
        <div key={name}>
          <dt title={hint}>{name}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  );
}

/** Figures by name as bars; the longest fills the width. */
export function Bars({ counts, unit }: { counts: Record<string, number>; unit?: string }) {
  const rows = Object.entries(counts).filter(([, count]) => count > 0);
  const most = Math.max(...rows.map(([, count]) => count), 1e-9);
  if (!rows.length) return <p class="quiet">None.</p>;
  return (
    <ul class="bars">
      {rows.map(([name, count]) => (
        <li key={name}>
          <span class="bar-name" title={name}>{name.replace(/_/g, " ")}</span>
          <span class="bar-track" aria-hidden="true">
            <span class="bar" style={{ width: `${(100 * count) / most}%` }} />
          </span>
          <span class="bar-value">{unit === "s" ? seconds(count) : number(count)}</span>
        </li>
      ))}
    </ul>
  );
}

export function Spark({ values, label }: { values: (number | null)[]; label: string }) {
  const given = values.map((value, at) => [at, value] as const).filter(([, v]) => v !== null);
  if (given.length < 2) return <span class="quiet">–</span>;
  const numbers = given.map(([, value]) => value as number);
  const low = Math.min(0, ...numbers);
  const high = Math.max(low + 1e-9, 1, ...numbers);
  const points = given.map(([at, value]) => {
    const x = (100 * at) / (values.length - 1);
    return `${x.toFixed(1)},${(23 - (22 * ((value as number) - low)) / (high - low)).toFixed(1)}`;
  });
  return (
    <svg class="spark" viewBox="0 0 100 24" preserveAspectRatio="none" role="img" aria-label={label}>
      <polyline points={points.join(" ")} />
    </svg>
  );
}

export function Crumbs({ run, items }: { run?: string; items?: [string, string | null][] }) {
  const all: [string, string | null][] = [["Runs", "/"]];
  if (run) all.push([run, runPath(run)]);
  all.push(...(items ?? []));
  return (
    <nav class="crumbs" aria-label="Breadcrumb">
      {all.map(([text, to], at) => (
        <span key={text}>
          {at > 0 && <span aria-hidden="true"> / </span>}
          {to && at < all.length - 1 ? <Link href={to}>{text}</Link> : <span>{text}</span>}
        </span>
      ))}
    </nav>
  );
}

/** The head of a page about a whole run. */
export function RunHead({ run, title }: { run: string; title: string }) {
  useTitle(`${title} of ${run}`);
  return (
    <>
      <Crumbs run={run} items={[[title, null]]} />
      <div class="head"><h1>{title}</h1></div>
    </>
  );
}

export function useTitle(title: string): void {
  useEffect(() => {
    document.title = `${title} · AgentRL`;
  }, [title]);
}

/** The splits of questions, as choices of a `select`. */
export function SplitOptions() {
  return (
    <>
      <option value="train">training</option>
      <option value="eval">evaluation</option>
      <option value="test">test</option>
      <option value="valid">validation</option>
    </>
  );
}

export function Field(props: { label: string; children: JSX.Element }) {
  return (
    <label class="field">
      <span>{props.label}</span>
      {props.children}
    </label>
  );
}
