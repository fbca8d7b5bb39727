package models_test

import (
	"cmp"
	"context"
	"maps"
	"os"
	"regexp"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/models"
	"github.com/euryale-ml/euryale/vm"
)

// BenchmarkAFolder measures the folder of EURYALE_FOLDER: the time from Load to the first token, in
// F32 and BF16, that of a Save of its learnables to EURYALE_SAVED, and the process' memory.
//
//	EURYALE_FOLDER=DIR EURYALE_SAVED=DIR2 go test ./models -run '^$' -bench AFolder -benchtime 1x
func BenchmarkAFolder(b *testing.B) {
	dir := os.Getenv("EURYALE_FOLDER")
	if dir == "" {
		b.Skip("needs EURYALE_FOLDER")
	}
	const more = 8 // tokens after the first one
	for name, precision := range map[string]vm.Precision{"f32": vm.F32, "bf16": vm.BF16} {
		b.Run("first token/"+name, func(b *testing.B) {
			for b.Loop() {
				m := require.Value(models.Load(dir))(b)
				g := require.Value(models.NewGenerator(m, nil,
					models.GenerateOptions{Context: 64, Precision: precision}))(b)
				built := b.Elapsed()
				var first, last time.Duration
				require.NoError(b, g.Generate(context.Background(), [][]int{{1, 2, 3, 4, 5}},
					models.Sampling{Max: 1 + more, Greedy: true}, func(int, int) error {
						last = b.Elapsed()
						first = cmp.Or(first, last)
						return nil
					}))
				b.ReportMetric(built.Seconds(), "s-built")
				b.ReportMetric(first.Seconds(), "s-first")
				b.ReportMetric(more/(last-first).Seconds(), "tokens/s")
				require.NoError(b, g.Close())
				require.NoError(b, m.Close())
			}
			report(b)
		})
	}
	b.Run("save", func(b *testing.B) {
		m := require.Value(models.Load(dir))(b)
		defer m.Close()
		began := time.Now()
		weights := learned(b, m)
		b.ReportMetric(time.Since(began).Seconds(), "s-to-learn")
		for b.Loop() {
			require.NoError(b, m.Save(os.Getenv("EURYALE_SAVED"), maps.All(weights)))
		}
		report(b)
	})
}

// report reports the memory that the process has, and has had, in files and beside them.
func report(b *testing.B) {
	text := require.Value(os.ReadFile("/proc/self/status"))(b)
	for _, is := range regexp.MustCompile(`(?m)^(VmHWM|RssAnon|RssFile):\s+(\d+)`).FindAllSubmatch(
		text, -1) {
		kib := 0.
		for _, c := range is[2] {
			kib = 10*kib + float64(c-'0')
		}
		b.ReportMetric(kib/(1<<20), "GiB-"+string(is[1]))
	}
}
