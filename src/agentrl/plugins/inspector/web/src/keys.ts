// Keys that work on every page. j and k move between links and buttons with `data-row`.

import { useEffect } from "preact/hooks";

export const KEYS: [string, string][] = [
  ["j / k", "next or previous row"],
  ["Enter", "open the row"],
  ["[ / ]", "previous or next rollout or step"],
  ["c", "color tokens by the next figure"],
  ["/", "search"],
  ["g", "all runs"],
  ["u", "one level up"],
  ["?", "this list"],
];

function walk(by: number): void {
  const rows = [...document.querySelectorAll<HTMLElement>("[data-row]")];
  if (!rows.length) return;
  const at = rows.indexOf(document.activeElement as HTMLElement);
  const next = at < 0 ? (by > 0 ? 0 : rows.length - 1) : at + by;
  rows[Math.min(rows.length - 1, Math.max(0, next))]?.focus();
}

export function useKeys(go: (path: string) => void, help: () => void): void {
  useEffect(() => {
    const press = (event: KeyboardEvent) => {
      const target = event.target as HTMLElement;
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (target.closest("input, select, textarea, dialog[open]")) return;
      const click = (name: string) =>
        document.querySelector<HTMLElement>(`[data-key="${name}"]`)?.click();
      const actions: Record<string, () => void> = {
        j: () => walk(1),
        k: () => walk(-1),
        g: () => go("/"),
        u: () => [...document.querySelectorAll<HTMLElement>(".crumbs a")].pop()?.click(),
        "?": help,
        "[": () => click("previous"),
        "]": () => click("next"),
        c: () => click("colour"),
        "/": () => document.querySelector<HTMLElement>('[data-key="search"]')?.focus(),
      };
      const action = actions[event.key];
      if (action) {
        event.preventDefault();
        action();
      }
    };
    document.addEventListener("keydown", press);
    return () => document.removeEventListener("keydown", press);
  }, [go, help]);
}
