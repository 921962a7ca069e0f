// The shell around the pages: breadcrumbs, search, theme and keys.

import { render } from "preact";
import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { Link, Route, Switch, useLocation, useSearch } from "wouter-preact";
import { ofRun, query, type RunTabs, type Session, useAsk } from "./api";
import { KEYS, useKeys } from "./keys";
import { ComparePage } from "./pages/compare";
import { DecisionsPage } from "./pages/decisions";
import { DiffPage } from "./pages/diff";
import { PolicyDiffsPage } from "./pages/policy_diffs";
import { DistributionsPage, FailuresPage, LivePage, QuestionsPage } from "./pages/behavior";
import { ForksPage } from "./pages/forks";
import { GroupPage } from "./pages/group";
import { GroupsPage } from "./pages/groups";
import { RecordPage } from "./pages/record";
import { RunPage } from "./pages/run";
import { RunsPage } from "./pages/runs";
import { SearchPage } from "./pages/search";
import { StepPage } from "./pages/step";
import { Loading, Problem, runPath, stepPath } from "./parts";
import { WordsProvider } from "./words";
import "./style.css";

const THEMES = ["auto", "light", "dark"];

function useTheme(): [string, () => void] {
  const [theme, set] = useState(() => localStorage.getItem("theme") ?? "auto");
  useEffect(() => {
    document.documentElement.dataset["theme"] = theme;
    localStorage.setItem("theme", theme);
  }, [theme]);
  const next = () => set(THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length] ?? "auto");
  return [theme, next];
}

function Search({ run }: { run: string }) {
  const [, go] = useLocation();
  return (
    <form
      role="search"
      class="search"
      onSubmit={(event) => {
        event.preventDefault();
        const words = new FormData(event.currentTarget).get("q");
        go(`${runPath(run)}/search${query({ q: String(words ?? "") })}`);
        document.getElementById("main")?.focus();
      }}
    >
      <input name="q" type="search" data-key="search" aria-label={`Search the texts of ${run}`} placeholder="Search texts  /" />
    </form>
  );
}

/** Links to the pages of a run, those that it has something for. */
function Tabs({ run }: { run: string }) {
  const [path] = useLocation();
  const search = useSearch();
  const { value } = useAsk<RunTabs>(ofRun(run, "tabs"));
  const base = runPath(run);
  const tabs: [string, string, boolean?][] = [
    ["Overview", base],
    ["Steps", stepPath(run, value?.last_step ?? 0), !value?.last_step],
    ["Groups", `${base}/groups`],
    ["Questions", `${base}/questions`],
    ["Evaluations", `${base}/questions${query({ split: "eval" })}`, !value?.has_evaluations],
    ["Worst decisions", `${base}/decisions`],
    ["Distributions", `${base}/distributions`],
    ["Failures", `${base}/failures`],
    ["In progress", `${base}/live`, !value?.is_running],
    ["Forks", `${base}/forks`, !value?.has_forks],
    ["Policy diffs", `${base}/diffs`, !value?.has_diffs],
  ];
  const here = (name: string, to: string) => {
    if (name === "Steps") return path.startsWith(`${base}/step/`);
    if (name === "Groups") return path.startsWith(`${base}/group`) || path === `${base}/record`;
    const isOfEvaluations = path === `${base}/questions` && search.includes("split=") && !search.includes("split=train");
    if (name === "Evaluations" || name === "Questions") return path === `${base}/questions` && isOfEvaluations === (name === "Evaluations");
    return path === to;
  };
  return (
    <nav class="tabs" aria-label={`Pages of ${run}`}>
      {tabs.filter(([, , without]) => !without).map(([name, to]) => (
        <Link key={name} href={to} aria-current={here(name, to) ? "page" : undefined}>{name}</Link>
      ))}
    </nav>
  );
}

function App() {
  const [path, go] = useLocation();
  const [theme, nextTheme] = useTheme();
  const help = useRef<HTMLDialogElement>(null);
  const showHelp = useCallback(() => help.current?.showModal(), []);
  useKeys(go, showHelp);
  const { value: session, error } = useAsk<Session>("/api/session");
  const run = /^\/runs\/([^/]+)/.exec(path)?.[1];
  useEffect(() => window.scrollTo(0, 0), [path]);
  return (
    <>
      <a class="skip" href="#main">Skip to the content</a>
      <header class="top">
        <Link href="/" class="brand">AgentRL</Link>
        {run && <Search run={decodeURIComponent(run)} />}
        <span class="spring" />
        {session?.may_control && <span class="badge badge-warn">control allowed</span>}
        <button type="button" class="ghost" onClick={nextTheme} aria-label={`Theme: ${theme}`}>
          {theme === "dark" ? "☾" : theme === "light" ? "☀" : "◐"}
        </button>
        <button type="button" class="ghost" onClick={showHelp} aria-label="Keys">?</button>
      </header>
      {run && session && <Tabs run={decodeURIComponent(run)} />}
      <main id="main" tabIndex={-1}>
        {!session && (error ? <Problem text={error} /> : <Loading />)}
        {session && <WordsProvider value={session.words}><Switch>
          <Route path="/"><RunsPage session={session} /></Route>
          <Route path="/compare"><ComparePage /></Route>
          <Route path="/runs/:run">{(at) => <RunPage run={decode(at.run)} session={session} />}</Route>
          <Route path="/runs/:run/groups">{(at) => <GroupsPage run={decode(at.run)} />}</Route>
          <Route path="/runs/:run/group">{(at) => <GroupPage run={decode(at.run)} />}</Route>
          <Route path="/runs/:run/record">{(at) => <RecordPage run={decode(at.run)} session={session} />}</Route>
          <Route path="/runs/:run/questions">{(at) => <QuestionsPage run={decode(at.run)} />}</Route>
          <Route path="/runs/:run/decisions">{(at) => <DecisionsPage run={decode(at.run)} />}</Route>
          <Route path="/runs/:run/distributions">{(at) => <DistributionsPage run={decode(at.run)} />}</Route>
          <Route path="/runs/:run/failures">{(at) => <FailuresPage run={decode(at.run)} session={session} />}</Route>
          <Route path="/runs/:run/live">{(at) => <LivePage run={decode(at.run)} />}</Route>
          <Route path="/runs/:run/forks">{(at) => <ForksPage run={decode(at.run)} />}</Route>
          <Route path="/runs/:run/diffs">{(at) => <PolicyDiffsPage run={decode(at.run)} />}</Route>
          <Route path="/runs/:run/diff">{(at) => <DiffPage run={decode(at.run)} />}</Route>
          <Route path="/runs/:run/search">{(at) => <SearchPage run={decode(at.run)} />}</Route>
          <Route path="/runs/:run/step/:step">
            {(at) => <StepPage run={decode(at.run)} step={Number(at.step)} />}
          </Route>
          <Route>
            <h1>Page not found</h1>
            <p><Link href="/">All runs</Link></p>
          </Route>
        </Switch></WordsProvider>}
      </main>
      <dialog ref={help} aria-labelledby="keys">
        <h2 id="keys">Keys</h2>
        <dl class="facts">
          {KEYS.map(([key, text]) => (
            <div key={key}><dt><kbd>{key}</kbd></dt><dd>{text}</dd></div>
          ))}
        </dl>
        <form method="dialog"><button type="submit">Close</button></form>
        {session && <p class="quiet">AgentRL {session.version}</p>}
      </dialog>
    </>
  );
}

function decode(part: string): string {
  return decodeURIComponent(part);
}

const place = document.getElementById("app");
if (place) render(<App />, place);
