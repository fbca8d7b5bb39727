package repolint_test

import (
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// result is a result that a page, a comment or another result cites by its name, or several by a
// pattern. The directories before it are there in a path only.
var result = regexp.MustCompile(
	`(results/[\w-]*/?)?(20\d\d-\d\d-\d\d-[\w*-]+\.(?:jsonl|txt|md|svg))`)

// citing are the endings of files that cite results.
var citing = []string{".go", ".cu", ".cuh", ".c", ".cpp", ".h", ".py", ".md", ".mk", ".json",
	".jsonl", ".txt"}

const results = "bench/results"

// texts returns what may cite results, by name.
func texts(t *testing.T) map[string]string {
	t.Helper()
	all := map[string]string{}
	require.NoError(t, filepath.WalkDir(".", func(name string, d fs.DirEntry, err error) error {
		name = filepath.ToSlash(name)
		ignored := name != "." && name[0] == '.' || name == "bin" || name == "bench/out"
		switch {
		case err != nil:
			return err
		case d.IsDir() && ignored:
			return fs.SkipDir
		case d.IsDir() || !slices.Contains(citing, path.Ext(name)) || name == results+"/README.md":
			return nil
		}
		text, err := os.ReadFile(name)
		all[name] = string(text)
		return err
	}))
	return all
}

// Numbers in pages and comments can be traced to a measurement, and each measurement is there for
// one: pages and comments cite it, or a result that they cite does. Results lie in a directory for
// each month.
func TestResultsAreCitedAndCitationsExist(t *testing.T) {
	atRoot(t)
	all := texts(t)
	files, err := filepath.Glob(results + "/*/*")
	require.That(t, err == nil && len(files) != 0, "%v %v", files, err)
	paths := map[string]string{}
	for _, file := range files {
		paths[path.Base(file)] = file
		month, name := path.Base(path.Dir(file)), path.Base(file)
		require.Check(t, strings.HasPrefix(name, month+"-"), "%s is not of %s", file, month)
	}
	cited := map[string]bool{}
	var cites func(file string)
	cites = func(file string) {
		for _, found := range result.FindAllStringSubmatch(all[file], -1) {
			dir, pattern, known := found[1], found[2], false
			for name := range paths {
				if ok, _ := path.Match(pattern, name); !ok {
					continue
				}
				known = true
				if !cited[name] {
					cited[name] = true
					cites(paths[name])
				}
			}
			if month := "results/" + pattern[:len("2006-01")] + "/"; !known || dir != "" &&
				dir != month {
				t.Errorf("%s cites %s, which does not exist", file, found[0])
			}
		}
	}
	for file := range all {
		if !strings.HasPrefix(file, results+"/") {
			cites(file)
		}
	}
	for name, file := range paths {
		require.Check(t, cited[name], "nothing cites %s: remove it, or say what it shows", file)
	}
}
