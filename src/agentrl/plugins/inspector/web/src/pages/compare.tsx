// Two to eight runs on shared axes, and the differences between their configurations.

import { useEffect, useMemo, useState } from "preact/hooks";
import { Link, useSearch } from "wouter-preact";
import { ask, type Curves, ofRun, type Words } from "../api";
import { Curve } from "../charts";
import { Crumbs, Loading, Problem, runPath, Section, useTitle } from "../parts";
import { useWords } from "../words";

const SHOWN = ["reward_mean", "entropy", "sampler_kl_k3", "kl", "grad_norm", "tokens_per_second", "loss"];
const MOST = 8;

interface One {
  run: string;
  curves: Curves;
  config: Record<string, unknown>;
}

export function ComparePage() {
  const names = (new URLSearchParams(useSearch()).get("runs") ?? "").split(",").filter(Boolean).slice(0, MOST);
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
  const charts = useMemo(() => (found ? chartsOf(found, stepWords, evalWords) : []), [found]);
  return (
    <>
      <Crumbs items={[["Compare", null]]} />
      <h1>Compare runs</h1>
      {names.length < 2 && <Problem text="Choose two to eight runs in the list of runs." />}
      {error && <Problem text={error} />}
      {!found && !error && <Loading />}
      {found && (
        <>
          <p>{found.map(({ run }) => <Link key={run} class="tag" href={runPath(run)}>{run}</Link>)}</p>
          <Section title="Curves">
            <div class="curves">
              {charts.map((chart) => <Curve key={chart.words.name} {...chart} />)}
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

function chartsOf(found: One[], stepWords: WordsOf, evalWords: WordsOf) {
  const charts = SHOWN.filter((name) => found.some((one) => one.curves.curves[name])).map((name) => ({
    words: stepWords(name),
    lines: found.map(({ run, curves }) => ({
      label: run,
      x: curves.step,
      y: curves.curves[name] ?? curves.step.map(() => null),
    })),
  }));
  charts.splice(1, 0, {
    words: { ...stepWords("staleness"), name: "Staleness, mean", unit: "versions" },
    lines: found.map(({ run, curves }) => ({ label: run, x: curves.step, y: staleness(curves) })),
  });
  if (found.some((one) => one.curves.evals.length)) {
    charts.splice(1, 0, {
      words: evalWords("reward_mean"),
      lines: found.map(({ run, curves }) => ({
        label: run,
        x: curves.evals.map((one) => one.version),
        y: curves.evals.map((one) => one.reward_mean),
      })),
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
