// Builds the pages into ../static, which the wheel ships: one script, one style sheet, no hashes in
// their names, so that a change of the sources changes few files of the repository.
import { defineConfig } from "vite";

export default defineConfig({
  base: "/static/",
  esbuild: { jsx: "automatic", jsxImportSource: "preact", legalComments: "none" },
  resolve: {
    alias: { react: "preact/compat", "react-dom": "preact/compat" },
  },
  build: {
    outDir: "../static",
    emptyOutDir: true,
    target: "es2022",
    // CSP lets no data: URL load as a script or a style, and none is needed.
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    rollupOptions: {
      output: {
        entryFileNames: "inspector.js",
        assetFileNames: "inspector.[ext]",
        inlineDynamicImports: true,
      },
    },
  },
});
