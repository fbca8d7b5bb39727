package files

// Map returns nil: nobody could replace a mapped file here.
func Map(File, int64) []byte { return nil }
