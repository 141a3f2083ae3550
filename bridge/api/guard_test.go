package api

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// parsed are the package's and the core's own files, without tests.
func parsed(t *testing.T, folder string) map[string]*ast.File {
	t.Helper()
	files := map[string]*ast.File{}
	err := filepath.Walk(folder, func(path string, _ os.FileInfo, err error) error {
		if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
		files[path] = file
		return err
	})
	require.NoError(t, err)
	require.NotEmpty(t, files)
	return files
}

// callee is the name of the function that an expression calls, "" for none.
func callee(e ast.Expr) string {
	call, ok := e.(*ast.CallExpr)
	if !ok {
		return ""
	}
	switch f := call.Fun.(type) {
	case *ast.Ident:
		return f.Name
	case *ast.IndexExpr:
		if id, ok := f.X.(*ast.Ident); ok {
			return id.Name
		}
	}
	return ""
}

// Every exported function is one call of a function that recovers panics: outside of it nothing can go wrong.
func TestEveryExportedFunctionIsGuarded(t *testing.T) {
	// AtForkChild sets one C variable, in a process where nothing of Go may run.
	guards := map[string]bool{"guard": true, "value": true, "AtForkChild": true}
	exported := 0
	for range 3 { // helpers that are built on helpers
		for _, file := range parsed(t, ".") {
			for _, decl := range file.Decls {
				f, ok := decl.(*ast.FuncDecl)
				if !ok || f.Recv != nil || len(f.Body.List) != 1 {
					continue
				}
				if ret, ok := f.Body.List[0].(*ast.ReturnStmt); ok && len(ret.Results) == 1 && guards[callee(ret.Results[0])] {
					guards[f.Name.Name] = true
				}
			}
		}
	}
	for path, file := range parsed(t, ".") {
		for _, decl := range file.Decls {
			if f, ok := decl.(*ast.FuncDecl); ok && f.Recv == nil && f.Name.IsExported() {
				exported++
				require.True(t, guards[f.Name.Name], "%s: %s is not one call of guard or value", path, f.Name.Name)
			}
		}
	}
	require.Greater(t, exported, 25)
}

// Every goroutine of bridge and core runs something that recovers, or has no code of others in it; those are listed here with the reason.
func TestEveryGoroutineIsKnown(t *testing.T) {
	known := map[string]string{
		"mover_fake.go": "the fake accelerator, for tests",
		"workers.go":    "a job recovers in its own loop",
		"worker.go":     "doMove and doLoad recover",
		"slices.go":     "the same",
		"codec.go":      "recovers",
	}
	found := 0
	for _, folder := range []string{"../../gocore", ".."} {
		for path, file := range parsed(t, folder) {
			ast.Inspect(file, func(n ast.Node) bool {
				_, starts := n.(*ast.GoStmt)
				if call, ok := n.(*ast.CallExpr); ok {
					if f, ok := call.Fun.(*ast.SelectorExpr); ok && f.Sel.Name == "Go" { // WaitGroup's and errgroup's
						starts = true
					}
				}
				if starts {
					found++
					require.NotEmpty(t, known[filepath.Base(path)], "%s starts a goroutine: it has to recover, and to be listed", path)
				}
				return true
			})
		}
	}
	require.GreaterOrEqual(t, found, 5)
}
