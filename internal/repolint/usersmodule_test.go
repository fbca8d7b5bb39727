package repolint_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestProgramsCompileInAUsersModule: what README says of a checkout works, for its program and for
// copies of the examples.
func TestProgramsCompileInAUsersModule(t *testing.T) {
	atRoot(t)
	checkout, err := filepath.Abs(".")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for _, example := range []string{"allreduce", "convnet", "digits", "gpt", "gradient"} {
		copyProgram(t, filepath.Join("examples", example), filepath.Join(dir, example))
	}
	readme, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	program := regexp.MustCompile("(?s)```go\n(.*?)```").FindSubmatch(readme)
	if program == nil || !strings.Contains(string(readme), "go work init . ") {
		t.Fatal("README.md has no program, or does not say how to use a checkout")
	}
	writeFile(t, filepath.Join(dir, "readme", "main.go"), program[1])
	for _, args := range [][]string{
		{"mod", "init", "example.com/mine"}, {"work", "init", ".", checkout}, {"build", "./..."},
	} {
		cmd := exec.Command("go", args...)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "GOWORK=", "GOFLAGS=", "GOPROXY=off")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("go %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
}

// The module is not published, so no page says to get it from where modules are.
func TestPagesSayHowToUseACheckout(t *testing.T) {
	atRoot(t)
	pages, err := filepath.Glob("docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	published := regexp.MustCompile(`go (get|install) [^\n]*github\.com/euryale-ml/euryale`)
	for _, page := range append(pages, "README.md", "CONTRIBUTING.md") {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		if found := published.Find(text); found != nil {
			t.Errorf("%s says %q", page, found)
		}
	}
}

// copyProgram copies the files of a program, without those of its tests.
func copyProgram(t *testing.T, from, to string) {
	t.Helper()
	files, err := os.ReadDir(from)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if f.IsDir() || strings.HasSuffix(f.Name(), "_test.go") {
			continue
		}
		text, err := os.ReadFile(filepath.Join(from, f.Name()))
		if err != nil {
			t.Fatal(err)
		}
		writeFile(t, filepath.Join(to, f.Name()), text)
	}
}

func writeFile(t *testing.T, path string, text []byte) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
}
