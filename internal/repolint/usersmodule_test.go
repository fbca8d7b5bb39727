package repolint_test

import (
	"bytes"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/launch"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// program returns the first program of a page.
func program(t *testing.T, page string) []byte {
	t.Helper()
	text := require.Value(os.ReadFile(page))(t)
	found := regexp.MustCompile("(?s)```go\n(package main.*?)```").FindSubmatch(text)
	require.That(t, found != nil, "%s has no program", page)
	return found[1]
}

// TestReadmesProgramCompilesInAUsersModule: what docs/install.md says of a workspace works.
func TestReadmesProgramCompilesInAUsersModule(t *testing.T) {
	atRoot(t)
	checkout := require.Value(filepath.Abs("."))(t)
	dir := t.TempDir()
	install := require.Value(os.ReadFile("docs/install.md"))(t)
	require.That(t, strings.Contains(string(install), "go work init . "),
		"docs/install.md does not say how to use a checkout in a workspace")
	writeFile(t, filepath.Join(dir, "main.go"), program(t, "README.md"))
	inModule(t, dir, "mod", "init", "example.com/mine")
	inModule(t, dir, "work", "init", ".", checkout)
	inModule(t, dir, "list", "-export", ".") // which compiles it
}

// TestReadmesModelTrainsAndPredicts: README's program trains on two ranks in a module that requires
// this one, and the program of docs/predict.md tells with its checkpoint what the flowers are. With
// EURYALE_FULL=1 the module's go.mod is made as README says, which asks for what tests of other
// modules require.
func TestReadmesModelTrainsAndPredicts(t *testing.T) {
	atRoot(t)
	checkout := require.Value(filepath.Abs("."))(t)
	readme := require.Value(os.ReadFile("README.md"))(t)
	flowers := require.Value(os.ReadFile("fit/testdata/flowers.csv"))(t)
	train, predict := program(t, "README.md"), program(t, "docs/predict.md")
	dir := t.TempDir()
	writeFile(t, filepath.Join(dir, "main.go"), train)
	writeFile(t, filepath.Join(dir, "predict/main.go"), predict)
	writeFile(t, filepath.Join(dir, "flowers.csv"), flowers)
	if os.Getenv("EURYALE_FULL") == "1" {
		said := regexp.MustCompile(`(?s)go (mod edit .*?)\n(go mod tidy)`).FindSubmatch(readme)
		require.That(t, said != nil, "README does not say how to make go.mod")
		inModule(t, dir, "mod", "init", "example.com/mine")
		edit := strings.ReplaceAll(string(said[1]), "../euryale", checkout)
		inModule(t, dir, strings.Fields(strings.ReplaceAll(edit, "\\\n", " "))...)
		inModule(t, dir, "mod", "tidy")
	} else {
		ownModule(t, dir, checkout)
	}
	inModule(t, dir, "build", "-o", "bin/", ".", "./predict")
	t.Chdir(dir)
	var out, errs bytes.Buffer
	err := launch.Run(t.Context(), launch.Job{Program: "bin/mine", Ranks: 2, Stdout: &out,
		Stderr: &errs})
	require.That(t, err == nil && strings.Contains(out.String(), "epoch 50/50: loss="),
		"README's program: %v\n%s%s", err, &out, &errs)

	// a table of another order of columns, without species
	lines := strings.Split(strings.TrimSpace(string(flowers)), "\n")
	var unknown, want strings.Builder
	for i, line := range lines {
		f := strings.Split(line, ",")
		number := fmt.Sprint(i)
		if i == 0 {
			number = "number"
		} else {
			want.WriteString(f[4] + "\n")
		}
		fmt.Fprintln(&unknown, strings.Join([]string{f[3], number, f[1], f[0], f[2]}, ","))
	}
	writeFile(t, "new.csv", []byte(unknown.String()))
	said, err := exec.CommandContext(t.Context(), "bin/predict").Output()
	require.That(t, err == nil && string(said) == want.String(),
		"docs/predict.md's program: %v, it says\n%s", err, said)
}

// examples are the programs to copy: the most lines and flags that each may have, and how a test
// runs it, where CHECKOUT is the repository.
var examples = map[string]struct {
	lines, flags int
	args, prints string
}{
	"allreduce": {50, 0, "", "the sum of all is [3 30 300]"},
	"gradient":  {40, 0, "", "loss 9 gradient 12"},
	"digits":    {141, 6, "-epochs 2", "epoch 2/2: loss="},
	"convnet":   {300, 4, "-epochs 1", "epoch 1/1: loss="},
	"elastic":   {175, 4, "-steps 50", "step 50: loss"},
	"gpt":       {640, 17, "--data trainer.go --layers 1 --width 32 --steps 2", "step 2/2: loss="},
	"moe":       {300, 15, "--ep 2 --context 2 --epochs 2 --steps 2", "epoch 2/2: loss="},
	"recommender": {
		300, 12, "--users 500 --epochs 1 --steps 2", "epoch 1/1: loss=",
	},
	"resnet": {300, 11, "--images 16 --batch 8 --filters 2 --epochs 1 --curve curve.svg",
		"epoch 1/1: loss="},
	"charlstm": {300, 11, "--data main.go --hidden 8 --epochs 1", "epoch 1/1: loss="},
	"finetune": {560, 23, "CHECKOUT/models/testdata/llama3 --data CHECKOUT/README.md --out out " +
		"--context 16 --steps 2", "step 2/2: loss="},
	"generate": {300, 11, "CHECKOUT/models/testdata/llama3 --prompt lazy --max 9", " ox  do  do"},
}

// flagged matches a definition of a flag.
var flagged = regexp.MustCompile(
	`\bflags?\.(?:Bool|Duration|Float64|Func|Int|String|Uint64|Var)(?:Var)?\(`)

// TestExamplesAreProgramsToCopy: each is short, imports what users may, compiles in a module of a
// user, and runs there on two ranks: two of them do, and all with EURYALE_FULL=1, since to link one
// takes a second. Tests of each example run it on ranks, too, except elastic, which has none.
func TestExamplesAreProgramsToCopy(t *testing.T) {
	atRoot(t)
	checkout := require.Value(filepath.Abs("."))(t)
	lines, flags := map[string]int{}, map[string]int{}
	for _, f := range sources(t) { // all are read, so that no outcome is of other sources
		parts := strings.Split(f.name, "/")
		if len(parts) != 3 || parts[0] != "examples" || f.test() || f.Name.Name != "main" {
			continue
		}
		text := require.Value(os.ReadFile(f.name))(t)
		lines[parts[1]] += bytes.Count(text, []byte("\n"))
		flags[parts[1]] += len(flagged.FindAll(text, -1))
	}
	for name := range lines {
		e, listed := examples[name]
		if !listed || lines[name] > e.lines || flags[name] > e.flags {
			t.Errorf("examples/%s has %d lines and %d flags: it may have %d and %d",
				name, lines[name], flags[name], e.lines, e.flags)
		}
	}
	require.Check(t, len(lines) == len(examples), "there are %d examples, want %d", len(lines),
		len(examples))
	dir := t.TempDir()
	for name := range examples {
		copyProgram(t, filepath.Join("examples", name), filepath.Join(dir, name))
	}
	ownModule(t, dir, checkout)
	inModule(t, dir, "list", "-export", "./...")
	sizes := map[string]int{} // in MB
	for name, e := range examples {
		if name == "digits" || name == "elastic" || os.Getenv("EURYALE_FULL") == "1" {
			inModule(t, filepath.Join(dir, name), "build", "-ldflags=-s -w", "-o", "program", ".")
			sizes[name] = runExample(t, name, filepath.Join(dir, name), checkout, e.args, e.prints)
		}
	}
	installSays(t, sizes)
}

// runExample runs the program of an example on two ranks, also with wrong flags, and returns how
// many MB it has.
func runExample(t *testing.T, name, dir, checkout, args, prints string) (size int) {
	t.Helper()
	t.Chdir(dir) // where the program finds its arguments
	info := require.Value(os.Stat("program"))(t)
	var out, errs bytes.Buffer
	job := launch.Job{
		Program: "./program", Ranks: 2, Stdout: &out, Stderr: &errs,
		Args: strings.Fields(strings.ReplaceAll(args, "CHECKOUT", checkout)),
	}
	refusesWrongFlags(t, job.Program, job.Args)
	if name == "elastic" {
		job.Elastic = &launch.Elastic{Least: 1}
	}
	if err := launch.Run(t.Context(), job); err != nil || !strings.Contains(out.String(), prints) {
		t.Errorf("%s: %v, and no %q in\n%s%s", name, err, prints, out.String(), errs.String())
	}
	t.Chdir(checkout)
	return int(math.Round(float64(info.Size()) / 1e6))
}

// numbered and worded match a flag in a program's help: of a number, and of some words.
var (
	numbered = regexp.MustCompile(`(?m)^ +-(\S+) (?:int|float)$`)
	worded   = regexp.MustCompile(`(?m)^ +-(device|precision|dtype|cell) string$`)
)

// refusesWrongFlags checks that a wrong value of a flag is found before anything starts: a program
// says what to use, and ends with the code for which no launcher starts it again.
func refusesWrongFlags(t *testing.T, program string, args []string) {
	t.Helper()
	help, _ := exec.Command(program, "-h").CombinedOutput()
	for value, flags := range map[string]*regexp.Regexp{"-1": numbered, "x": worded} {
		for _, flag := range flags.FindAllSubmatch(help, -1) {
			wrong := "--" + string(flag[1]) + "=" + value
			c := exec.CommandContext(t.Context(), program, append(args, wrong)...)
			c.Env = append(os.Environ(), "EURYALE_BACKEND=none") // with which nothing starts
			out, err := c.CombinedOutput()
			if err == nil || c.ProcessState.ExitCode() != 2 ||
				bytes.Contains(out, []byte("none")) || !bytes.Contains(out, []byte("use ")) {
				t.Errorf("%s %s: %v\n%s", t.Name(), c.Args, err, out)
			}
		}
	}
}

// installSays checks the sizes of programs of Gorgonia in docs/install.md.
func installSays(t *testing.T, sizes map[string]int) {
	t.Helper()
	delete(sizes, "allreduce") // which has no Gorgonia
	text, err := os.ReadFile("docs/install.md")
	said := regexp.MustCompile(`has (\d+) to (\d+) MB, and (\d+) if it draws curves`).
		FindSubmatch(text)
	require.That(t, err == nil && said != nil, "docs/install.md says no sizes of programs: %v", err)
	var least, most, drawing int
	require.NoError(t,
		require.Err(fmt.Sscan(string(bytes.Join(said[1:], []byte(" "))), &least, &most, &drawing)))
	for name, size := range sizes { // more or less, since they differ by linkers
		if runtime.GOARCH == "amd64" && (size < least-1 || size > drawing+1 ||
			size > most+1 && size < drawing-1) {
			t.Errorf("examples/%s has %d MB, and docs/install.md says %s", name, size, said[0])
		}
	}
}

// ownModule makes a folder a module that uses a checkout, with the versions that the checkout has.
func ownModule(t *testing.T, dir, checkout string) {
	t.Helper()
	for _, name := range []string{"go.mod", "go.sum"} {
		text := require.Value(os.ReadFile(filepath.Join(checkout, name)))(t)
		writeFile(t, filepath.Join(dir, name), text)
	}
	inModule(t, dir, "mod", "edit", "-module=example.com/mine", "-require="+module+"@v0.0.0",
		"-replace="+module+"="+checkout)
}

// away matches what the go command says of a module that is not here, without a network.
var away = regexp.MustCompile(`dial (tcp|udp)|module lookup disabled by GOPROXY=off`)

// inModule runs the go command in the folder of a user's module. What it reads of other modules may
// not be here yet: a workspace takes more than the checkout does.
func inModule(t *testing.T, dir string, args ...string) {
	t.Helper()
	cmd := exec.Command("go", args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "PWD="+dir, "GOWORK=")
	out, err := cmd.CombinedOutput()
	if err != nil && away.Match(out) {
		t.Skipf("needs the module proxy, since a module is not here yet: go %s: %s",
			strings.Join(args, " "), out)
	}
	if err != nil {
		t.Fatalf("go %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

// The module is not published, so no page says to get it from where modules are.
func TestPagesSayHowToUseACheckout(t *testing.T) {
	atRoot(t)
	pages := require.Value(filepath.Glob("docs/*.md"))(t)
	published := regexp.MustCompile(`go (get|install) [^\n]*github\.com/euryale-ml/euryale`)
	for _, page := range append(pages, "README.md", "CONTRIBUTING.md") {
		text := require.Value(os.ReadFile(page))(t)
		found := published.Find(text)
		require.Check(t, found == nil, "%s says %q", page, found)
	}
}

// copyProgram copies the files of a program, without those of its tests.
func copyProgram(t *testing.T, from, to string) {
	t.Helper()
	files := require.Value(os.ReadDir(from))(t)
	for _, f := range files {
		if f.IsDir() || strings.HasSuffix(f.Name(), "_test.go") {
			continue
		}
		text := require.Value(os.ReadFile(filepath.Join(from, f.Name())))(t)
		writeFile(t, filepath.Join(to, f.Name()), text)
	}
}

func writeFile(t *testing.T, path string, text []byte) {
	t.Helper()
	require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
	require.NoError(t, os.WriteFile(path, text, 0o600))
}
