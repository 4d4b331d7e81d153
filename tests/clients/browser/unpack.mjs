// Unpacks Chromium into the folder that TMPDIR names, with the libraries that a bare machine lacks (in al2023/lib).
// The package brings those only where it finds itself on a bare machine of a kind that it knows: it is told so.
process.env.AWS_EXECUTION_ENV = "AWS_Lambda_nodejs20.x";
const { default: chromium } = await import("@sparticuz/chromium");
console.log(await chromium.executablePath());
