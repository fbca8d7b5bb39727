package tokenizer

import (
	"cmp"
	"compress/gzip"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// foreign is a folder of testdata/folders.py.
type foreign struct {
	Files          map[string]json.RawMessage
	Texts          []string
	Class, Error   string
	Plain, Special [][]int
	Decoded        []decoded
	BOS, EOS       *int
}

// foreigners returns the folders that are committed, and in a full test others that are made now:
// EURYALE_FOLDERS and EURYALE_SEED say how many, and which.
func foreigners(t *testing.T) (all []foreign) {
	t.Helper()
	names := []string{"testdata/folders.json.gz"}
	if os.Getenv("EURYALE_FULL") == "1" {
		// Classes of other versions make other tokenizers of some folders: those of 5.17 do.
		if exec.Command("python3", "-c", "import tokenizers, transformers\n"+
			"assert transformers.__version__.startswith('5.24.')").Run() != nil {
			t.Log("python3 has no tokenizers and transformers 5.24: nothing is made anew")
		} else {
			names = append(names, filepath.Join(t.TempDir(), "folders.json.gz"))
			text, err := exec.Command("python3", "testdata/folders.py", names[1],
				cmp.Or(os.Getenv("EURYALE_FOLDERS"), "300"),
				cmp.Or(os.Getenv("EURYALE_SEED"), "1")).CombinedOutput()
			require.That(t, err == nil, "%v\n%s", err, text)
		}
	}
	for _, name := range names {
		f := require.Value(os.Open(name))(t)
		defer f.Close()
		z := require.Value(gzip.NewReader(f))(t)
		var some []foreign
		require.NoError(t, json.NewDecoder(z).Decode(&some))
		all = append(all, some...)
	}
	return all
}

// TestRandomFoldersGiveTheIDsOfTransformersOrAreRefused: by transformers' AutoTokenizer, whatever
// their files ask for.
func TestRandomFoldersGiveTheIDsOfTransformersOrAreRefused(t *testing.T) {
	equal, refused, alone, both := 0, 0, 0, 0
	for i, f := range foreigners(t) {
		files := map[string]string{}
		for name, text := range f.Files {
			files[name] = string(text)
		}
		tok, err := Load(folder(t, files))
		switch {
		case err != nil && f.Error != "":
			both++
		case err != nil:
			refused++
			t.Logf("refused: folder %d: %v", i, err)
		case f.Error != "":
			alone++
			t.Logf("refused there alone: folder %d: %s", i, f.Error)
		default:
			equal++
			require.Check(t, f.equals(t, tok), "folder %d is another one for %s", i, f.Class)
		}
	}
	t.Logf("%d equal, %d refused here, %d there, %d by both", equal, refused, alone, both)
	require.Check(t, equal >= refused, "most folders are refused")
}

// equals reports whether a tokenizer does what transformers did.
func (f *foreign) equals(t *testing.T, tok *Tokenizer) bool {
	for i, text := range f.Texts {
		plain, special := tok.Encode(text, false), tok.Encode(text, true)
		if !slices.Equal(plain, f.Plain[i]) || !slices.Equal(special, f.Special[i]) {
			t.Errorf("%q is %v, want %v, or with special tokens %v, want %v", text, plain,
				f.Plain[i], special, f.Special[i])
			return false
		}
	}
	for _, d := range f.Decoded {
		skipped, whole := tok.Decode(d.ids, true), tok.Decode(d.ids, false)
		if skipped != d.skipped || whole != d.text {
			t.Errorf("%v is %q, want %q, or without special tokens %q, want %q", d.ids, whole,
				d.text, skipped, d.skipped)
			return false
		}
	}
	for is, want := range map[*int]*int{&tok.BOS: f.BOS, &tok.EOS: f.EOS} {
		if want == nil && *is != -1 || want != nil && *is != *want {
			t.Errorf("BOS and EOS are %d and %d", tok.BOS, tok.EOS)
			return false
		}
	}
	return true
}
