//go:build unix

package main

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"runtime/metrics"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/autograd"
	"github.com/euryale-ml/euryale/fit/data"
	"github.com/euryale-ml/euryale/internal/files"
	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/models"
	"github.com/euryale-ml/euryale/models/tokenizer"
)

// readers are what opens the files of others. Their errors are no failures of the test.
func readers() []func(dir string) string {
	return []func(dir string) string{
		func(dir string) string {
			_, out, errs := commandLine("report", "--trace", filepath.Join(dir, "all"), dir)
			return out + errs
		},
		func(dir string) string {
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter,
				r *http.Request) {
				text, _ := files.Read(filepath.Join(dir, "metrics"), 16<<20)
				w.Write(text)
			}))
			defer server.Close()
			_, out, errs := commandLine("top", strings.TrimPrefix(server.URL, "http://"))
			return out + errs
		},
		func(dir string) string {
			m, err := models.Load(dir)
			if err == nil { // what is refused is of no interest, only that nothing else happens
				_ = errors.Join(m.LoadAdapter(filepath.Join(dir, "adapter")), m.Close())
			}
			_, _ = tokenizer.Load(dir)
			return ""
		},
		func(dir string) string {
			_, _ = autograd.ReadWeights(filepath.Join(dir, "model.safetensors"))
			_, _, _ = data.CSV(filepath.Join(dir, "epochs.csv"), "loss")
			_, _ = data.IDX(filepath.Join(dir, "idx"), filepath.Join(dir, "idx"))
			_, _, _ = data.Images(filepath.Join(dir, "images"), 4, 4)
			return ""
		},
	}
}

// goodFiles are what the readers understand, by reader.
func goodFiles(t *testing.T) (all [4]map[string][]byte) {
	t.Helper()
	dir := t.TempDir()
	self := require.Value(os.Executable())(t)
	job := command(t, "run", "-n", "2", "--log-dir", dir, self, brokenRank, "not at all")
	job.Env = append(job.Env, "EURYALE_TRACE="+filepath.Join(dir, "trace"))
	out, err := job.CombinedOutput()
	require.That(t, err == nil, "%v\n%s", err, out)
	tree := func(dir string) map[string][]byte {
		found := map[string][]byte{}
		require.NoError(t, fs.WalkDir(os.DirFS(dir), ".", func(name string, d fs.DirEntry,
			err error) error {
			if err == nil && d.Type().IsRegular() {
				found[name], err = os.ReadFile(filepath.Join(dir, name))
			}
			return err
		}))
		return found
	}
	all[0] = tree(dir)
	all[0]["epochs.csv"] = []byte("epoch,steps,rate,loss,seconds\n1,10,0.1,2,3\n2,20,0.1,1,3\n")
	all[0]["epochs.jsonl"] = []byte(`{"Epoch":1,"Steps":9,"Loss":2,"Metrics":{"a":1}}` + "\n")
	all[0]["plan.json"] = []byte(`{"arena_bytes":9,"beside":{"x":1},"steps":[{"bytes":2}]}`)
	all[1] = map[string][]byte{"metrics": []byte(metricsOf(1))}
	all[2] = tree("../../models/testdata/llama3")
	all[3] = map[string][]byte{"model.safetensors": all[2]["model.safetensors"],
		"epochs.csv": all[0]["epochs.csv"], "idx": {0, 0, 8, 1, 0, 0, 0, 2, 5, 6},
		"images/0/a.png": []byte("\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" +
			"\x7f\x00\x00\x00\x7f\x00\x00\x00")}
	return all
}

// numbers finds the numbers of a text.
var numbers = regexp.MustCompile(`\d+`)

// spoil changes a file of a folder.
func spoil(t *testing.T, draw *rand.Rand, path string, text []byte) {
	pick := func(all ...string) string { return all[draw.IntN(len(all))] }
	at := draw.IntN(len(text) + 1)
	remake := func(err error) { require.NoError(t, err) }
	switch kind := draw.IntN(14); kind {
	case 0:
		remake(errors.Join(os.Remove(path), syscall.Mkfifo(path, 0o600)))
		return
	case 1:
		remake(errors.Join(os.Remove(path), os.Symlink(pick("/dev/zero", "../victim", ".",
			"/etc/passwd", "../victims"), path)))
		return
	case 2:
		if err := os.Truncate(path, 1<<40); err != nil {
			remake(os.Truncate(path, 1<<30))
		}
		return
	case 3: // another name
		name := numbers.ReplaceAllString(filepath.Base(path), pick("99999", "4611686018427387904",
			"\x1b[2J\u202e\u009b", "00"))
		remake(os.Rename(path, filepath.Join(filepath.Dir(path), name)))
		return
	case 4:
		remake(errors.Join(os.Remove(path), os.Mkdir(path, 0o700)))
		return
	case 5: // other numbers
		all := numbers.FindAllIndex(text, 200)
		for range min(len(all), 1+draw.IntN(3)) {
			n := all[draw.IntN(len(all))]
			text = append(append(bytes.Clone(text[:n[0]]), pick("4611686018427387904", "-1", "0",
				"1e308", "9223372036854775807", "99999", "16777216", "NaN", "2147483647")...),
				text[n[1]:]...)
			all = numbers.FindAllIndex(text, 200)
		}
	case 6:
		text = text[:at]
	case 7, 8:
		text = bytes.Clone(text)
		for range min(len(text), 1+draw.IntN(8)) {
			text[draw.IntN(len(text))] = byte(draw.IntN(256))
		}
	case 9: // deep
		text = append(append(bytes.Clone(text[:at]), strings.Repeat(pick("[", `{"a":`, "("),
			1<<draw.IntN(18))...), text[at:]...)
	case 10: // long
		text = append(append(bytes.Clone(text[:at]), strings.Repeat(pick("\n", ",", "x", "0", "{},",
			string(text[at:min(len(text), at+40)])), 1<<draw.IntN(18))...), text[at:]...)
	case 11: // texts that are not to be shown
		text = bytes.ReplaceAll(text, []byte(pick("a", "e", "rank", ":")), []byte(hostile))
	case 12: // the length of a header
		text = append([]byte(strconv.Itoa(draw.IntN(1e9))), text...)
	default:
		text = append(text[:at:at], text...)
	}
	remake(os.WriteFile(path, text, 0o600))
}

// TestHostileFilesCostLittle draws folders that others may have written. Nothing panics or hangs,
// takes 1 GB, writes elsewhere, or writes to a terminal what the files say as they say it.
// EURYALE_HOSTILE=10000 draws so many files.
func TestHostileFilesCostLittle(t *testing.T) {
	cases, err := strconv.Atoi(os.Getenv("EURYALE_HOSTILE"))
	if err != nil {
		cases = 300
	}
	good, run := goodFiles(t), readers()
	parent := t.TempDir()
	for name, text := range map[string]string{"victim": "old", "victims/a": "old"} {
		path := filepath.Join(parent, name)
		require.NoError(t, errors.Join(os.MkdirAll(filepath.Dir(path), 0o700),
			os.WriteFile(path, []byte(text), 0o600)))
	}
	dir := filepath.Join(parent, "theirs")
	highest, slowest := uint64(0), time.Duration(0)
	for i := range cases {
		draw, reader := rand.New(rand.NewPCG(uint64(i), 0)), i%len(run)
		names := make([]string, 0, len(good[reader]))
		for name, text := range good[reader] {
			path := filepath.Join(dir, name)
			require.NoError(t, errors.Join(os.MkdirAll(filepath.Dir(path), 0o700),
				os.WriteFile(path, text, 0o600)))
			names = append(names, name)
		}
		slices.Sort(names)
		name := names[draw.IntN(len(names))]
		spoil(t, draw, filepath.Join(dir, name), good[reader][name])
		ended, began := make(chan string), time.Now()
		go func() { ended <- run[reader](dir) }()
		var said string
		for waiting := true; waiting; {
			select {
			case said = <-ended:
				waiting = false
			case <-time.After(5 * time.Millisecond):
			}
			if highest = max(highest, inUse()); highest > 1<<30 || time.Since(began) > 2*long {
				t.Fatalf("case %d, %s: %d MB after %v", i, name, highest>>20, time.Since(began))
			}
		}
		slowest = max(slowest, time.Since(began))
		shown := strings.ReplaceAll(said, "\t", "")
		require.Check(t, shown == strings.Map(printable, shown), "case %d, %s: %q", i, name, said)
		require.NoError(t, os.RemoveAll(dir))
		var left []string
		for _, name := range []string{"victim", "victims/a"} {
			text, _ := os.ReadFile(filepath.Join(parent, name))
			left = append(left, string(text))
		}
		found, _ := filepath.Glob(filepath.Join(parent, "*"))
		in, _ := filepath.Glob(filepath.Join(parent, "victims", "*"))
		if fmt.Sprint(left) != "[old old]" || len(found) != 2 || len(in) != 1 {
			t.Fatalf("case %d, %s: outside there is %v, %v, with %v", i, name, found, in, left)
		}
	}
	t.Logf("%d files: at most %d MB, %v", cases, highest>>20, slowest)
}

// inUse returns the memory that this process has from the system.
func inUse() uint64 {
	all := []metrics.Sample{{Name: "/memory/classes/total:bytes"},
		{Name: "/memory/classes/heap/released:bytes"}}
	metrics.Read(all)
	return all[0].Value.Uint64() - all[1].Value.Uint64()
}
