// Two to eight runs on shared axes, and the differences between their configurations.

import { useEffect, useMemo, useState } from "preact/hooks";
import { Link, useSearch } from "wouter-preact";
import { ask, type Curves, ofRun, type Words } from "../api";
import { Curve, CurveTools, type Line, useCurveView } from "../charts";
import { Crumbs, Loading, Problem, runPath, Section, useTitle } from "../parts";
import { useWords } from "../words";
import { evaluationLine, lineOf } from "./run";

const SHOWN = ["reward_mean", "entropy", "sampler_kl_k3", "kl", "grad_norm", "tokens_per_second", "loss"];
const MOST = 8;

interface One {
  run: string;
  curves: Curves;
  config: Record<string, unknown>;
}

export function ComparePage() {
  const asked = (new URLSearchParams(useSearch()).get("runs") ?? "").split(",").filter(Boolean);
  const names = [...new Set(asked)].slice(0, MOST);
  const key = names.join(",");
  useTitle(`Compare ${key}`);
  const [found, set] = useState<One[] | null>(null);
  const [error, setError] = useState<string | null>(null);
  const stepWords = useWords("step");
  const evalWords = useWords("eval");
  useEffect(() => {
    set(null);
    // Sequential requests, because the databases of a folder's runs are served one at a time.
    const read = async () => {
      const all: One[] = [];
      for (const run of key.split(",").filter(Boolean)) {
        const curves = await ask<Curves>(ofRun(run, "curves"));
        all.push({ run, curves, config: await ask<Record<string, unknown>>(ofRun(run, "config")) });
      }
      set(all);
    };
    read().catch((problem: Error) => setError(problem.message));
  }, [key]);
  const [view, setView] = useCurveView();
  const [bySeed, setBySeed] = useState(true);
  const groups = useMemo(() => experiments(found ?? []), [found]);
  const charts = useMemo(
    () => chartsOf(bySeed ? groups : groups.flat().map((one) => [one]), stepWords, evalWords),
    [groups, bySeed],
  );
  const onZoom = (from: number | null, to: number | null) => setView({ from, to });
  return (
    <>
      <Crumbs items={[["Compare", null]]} />
      <h1>Compare runs</h1>
      {names.length < 2 && <p class="quiet">To lay runs over one another, choose two to eight in the <Link href="/">list of runs</Link>.</p>}
      {error && <Problem text={error} />}
      {!found && !error && <Loading />}
      {found && (
        <>
          <p>{found.map(({ run }) => <Link key={run} class="tag" href={runPath(run)}>{run}</Link>)}</p>
          <Section title="Curves">
            <CurveTools view={view} set={setView}>
              {groups.some((group) => group.length > 1) && (
                <label class="field inline">
                  <input type="checkbox" checked={bySeed} onChange={(event) => setBySeed(event.currentTarget.checked)} />
                  <span>Runs that differ only in their seed as one band</span>
                </label>
              )}
            </CurveTools>
            <div class="curves">
              {charts.map((chart) => <Curve key={chart.words.name} {...chart} view={view} onZoom={onZoom} />)}
            </div>
          </Section>
          <Section title="Differences between the configurations">
            <Differences found={found} />
          </Section>
        </>
      )}
    </>
  );
}

function staleness(curves: Curves): (number | null)[] {
  return curves.spreads.staleness.map((counts) => {
    const rows = Object.entries(counts ?? {});
    const num = rows.reduce((sum, [, count]) => sum + count, 0);
    return num ? rows.reduce((sum, [age, count]) => sum + Number(age) * count, 0) / num : null;
  });
}

type WordsOf = (key: string) => Words;

/** Flags in which runs may differ that are otherwise the same experiment. */
const OF_ONE_RUN = /^(seed|run_name|output_path|.*_(dir|port|path|uri)|db_.*|host|port)$/;

/** Runs that differ at most in their seed, by the names of the runs. */
function experiments(found: One[]): One[][] {
  const groups = new Map<string, One[]>();
  for (const one of found) {
    const key = JSON.stringify(Object.entries(one.config).filter(([name]) => !OF_ONE_RUN.test(name)).sort());
    groups.set(key, [...(groups.get(key) ?? []), one]);
  }
  return [...groups.values()];
}

/** One line for several runs: their mean at every x, and the band from the lowest to the highest. */
function banded(lines: Line[]): Line {
  const [first] = lines;
  if (!first || lines.length === 1) return first as Line;
  const x = [...new Set(lines.flatMap((line) => line.x))].sort((one, other) => one - other);
  const at = lines.map((line) => new Map(line.x.map((step, index) => [step, line.y[index] ?? null])));
  const values = x.map((step) => at.map((known) => known.get(step) ?? null).filter((value) => value !== null));
  const of = (take: (found: number[]) => number) => values.map((found) => (found.length ? take(found) : null));
  return {
    label: `${first.label} and ${lines.length - 1} more`,
    x,
    y: of((found) => found.reduce((sum, value) => sum + value, 0) / found.length),
    low: of((found) => Math.min(...found)),
    high: of((found) => Math.max(...found)),
    band: "lowest to highest seed",
  };
}

function chartsOf(groups: One[][], stepWords: WordsOf, evalWords: WordsOf) {
  const found = groups.flat();
  const together = (line: (one: One) => Line) => groups.map((group) => banded(group.map(line)));
  const charts = SHOWN.filter((name) => found.some((one) => one.curves.curves[name])).map((name) => ({
    words: stepWords(name),
    lines: together(({ run, curves }) => lineOf(name, run, curves)),
  }));
  charts.splice(1, 0, {
    words: { ...stepWords("staleness"), name: "Staleness, mean", unit: "versions" },
    lines: together(({ run, curves }) => ({ label: run, x: curves.step, y: staleness(curves) })),
  });
  if (found.some((one) => one.curves.evals.length)) {
    charts.splice(1, 0, {
      words: evalWords("reward_mean"),
      lines: together(({ run, curves }) => evaluationLine(run, curves)),
    });
  }
  return charts;
}

function Differences({ found }: { found: One[] }) {
  const keys = [...new Set(found.flatMap(({ config }) => Object.keys(config)))].sort();
  const differing = keys.filter((key) => new Set(found.map(({ config }) => JSON.stringify(config[key]))).size > 1);
  if (!differing.length) return <p class="quiet">None.</p>;
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label="Differences between the configurations">
      <table>
        <thead>
          <tr><th scope="col">Flag</th>{found.map(({ run }) => <th key={run} scope="col">{run}</th>)}</tr>
        </thead>
        <tbody>
          {differing.map((key) => (
            <tr key={key}>
              <td><code>{key}</code></td>
              {found.map(({ run, config }) => (
                <td key={run} class="break">{config[key] === undefined ? "–" : typeof config[key] === "string" ? config[key] as string : JSON.stringify(config[key])}</td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
